"""Our host code on the fake device: no fault of order in any run, and planted ones are found."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from rollout_engine.model.cuda.copy_stream import CudaCopyStream
from rollout_engine.model.cuda.edit_records import EditRecords
from rollout_engine.model.cuda.pinned_upload import PinnedUpload
from rollout_engine.model.cuda.sampler import CudaSampler
from rollout_engine.model.cuda.shadow_memory import CudaShadowMemory
from rollout_engine.model.cuda.upload import Download, StaticColumns
from rollout_engine.model.cuda.weight_memory import CudaWeightMemory
from sync import nccl
from sync.broadcast import BroadcastEnd
from tests.fake_device.device import FakeDevice
from tests.fake_device.plants import Plant
from tests.unit.model.cuda import device_work as work

GUARDS_MEMORY = True
"""Harsh memory would be other memory to the fake device: `harsh_if_asked` leaves these tests out."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels have to run in Triton's interpreter")


def run(do, order, seed=0, *, reuses=True):
    """(faults, the exception that `do` raised) on a new device."""
    problem = None
    with FakeDevice(seed, order, reuses=reuses) as fake:
        try:
            do(fake)
            fake.finish()
        except Exception as raised:
            problem = raised
        return fake.faults, problem


def assert_sound(do, *order, **options):
    faults, problem = run(do, *order, **options)
    if problem is not None:
        raise problem
    assert faults == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("order", [pytest.param("eager", marks=pytest.mark.slow), "lazy", "random"])
@pytest.mark.parametrize("do", work.ALL)
def test_our_code_waits_for_all_that_it_has_to(do, order):
    assert_sound(do, order)


@pytest.mark.slow
@pytest.mark.parametrize("do", work.ALL)
def test_no_seed_finds_a_fault_in_our_code(do):
    for seed in range(1, 12):
        assert_sound(do, "random", seed, reuses=seed % 3 > 0)


class Planted(NamedTuple):
    """A fault in our code, work that meets it, and the kinds of which one is to be found."""

    plant: Plant
    do: Callable[[FakeDevice], Any]
    kinds: str
    reuses: bool = True


ENTERED = Plant(CudaCopyStream, "enter", "self._stream.wait_stream(torch.cuda.current_stream(self._device))", "pass")
FAULTS = {
    "a result is read before its copy has come": Planted(
        Plant(Download, "wait", "self._event.synchronize()", "pass"), work.downloads, "race uninitialised"
    ),
    "the event of a download is recorded before the copy": Planted(
        Plant(
            Download,
            "__init__",
            "self._host.copy_(source, non_blocking=True)\n        self._event = torch.cuda.Event()",
            "self._event = torch.cuda.Event(); self._event.record()\n"
            "        self._host.copy_(source, non_blocking=True); return",
        ),
        work.downloads,
        "race",
    ),
    "columns are packed into one pinned buffer for all steps": Planted(
        Plant(
            StaticColumns,
            "send",
            "packed = torch.empty(",
            "packed = self._packed = self._packed if hasattr(self, '_packed') else torch.empty(",
        ),
        work.static_columns,
        "race",
    ),
    "padding of columns is left as it is": Planted(
        Plant(StaticColumns, "send", "host[len(values) : size] = padding", "pass"),
        work.decode_graphs_replayed,
        "uninitialised",
    ),
    "columns of the next step are sent on another stream, while a graph reads these": Planted(
        Plant(
            StaticColumns,
            "send",
            "self.memory.copy_(packed, non_blocking=True)",
            "with torch.cuda.stream(torch.cuda.Stream()): self.memory.copy_(packed, non_blocking=True)",
        ),
        work.decode_graphs_replayed,
        "race",
    ),
    "a pinned buffer is filled before its last copy is done": Planted(
        Plant(PinnedUpload, "_buffer", "        wait()\n", ""), work.weights_from_the_host, "race"
    ),
    "the event of a copy is recorded before the copy": Planted(
        Plant(
            CudaCopyStream,
            "copy",
            "out.copy_(source, non_blocking=True)\n        done.record()",
            "done.record()\n        out.copy_(source, non_blocking=True)",
        ),
        work.copies_beside_steps,
        "race",
    ),
    "memory for a copy is what a step has just freed": Planted(
        Plant(CudaCopyStream, "allocate", "with torch.cuda.stream(self._stream):", "if True:"),
        work.copies_beside_steps,
        "race reuse",
    ),
    "a commit does not wait for the copies": Planted(
        Plant(
            CudaCopyStream, "lead_steps", "torch.cuda.current_stream(self._device).wait_stream(self._stream)", "pass"
        ),
        work.update_from_the_host,
        "race uninitialised",
    ),
    "a transfer reads what the trainer is still computing": Planted(ENTERED, work.update_from_a_trainer, "race"),
    "an update in place overwrites weights that a step still reads": Planted(ENTERED, work.update_in_place, "race"),
    "a shadow is freed and taken again while the commit reads it": Planted(
        Plant(CudaShadowMemory, "prepare_copy", "self._stream.wait_for_steps()", "pass"),
        work.a_shadow_is_freed,
        "reuse uninitialised",
    ),
    "graphs are replayed after their weights have moved": Planted(
        Plant(CudaWeightMemory, "release", "self._runner.graphs.void()", "pass"), work.decode_graphs_replayed, "stale"
    ),
    "a record of edits is freed before the kernel that has its address is launched": Planted(
        Plant(
            EditRecords,
            "_record",
            "(self._records[sequence_id],) = upload([record_of(edits, self._vocab_size, self._context)], self._device)",
            "return upload([record_of(edits, self._vocab_size, self._context)], self._device)[0]",
        ),
        work.draws,
        "stale",
        reuses=False,
    ),
    "an outcome is downloaded that no kernel has written": Planted(
        Plant(CudaSampler, "draw", "draw_plainly(logits, columns, memory, last_tokens)", "pass"),
        work.draws,
        "uninitialised",
    ),
    "a bucket is overwritten while it is copied": Planted(
        Plant(nccl, "_end", "stream.wait_stream(torch.cuda.current_stream(device))\n", "pass\n"), work.broadcast, "race"
    ),
    "a bucket is packed again while it is sent": Planted(
        Plant(BroadcastEnd, "finish", "work.wait(timedelta(seconds=self.group.config.timeout))", "pass"),
        work.broadcast,
        "race reuse",
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("order", ["lazy", pytest.param("random", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, order):
    plant, do, kinds, reuses = FAULTS[name]
    with plant.planted():
        faults, _ = run(do, order, reuses=reuses)
    found = {fault.kind for fault in faults}
    assert found & set(kinds.split()), f"{name}: found {found}"
