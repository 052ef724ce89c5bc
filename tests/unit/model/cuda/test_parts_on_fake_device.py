"""Parts of an engine alone on the fake device: no fault, and no wait."""

from contextlib import nullcontext

import pytest
import torch

from rollout_engine.kernels.cpu.adapters import AdapterRows
from rollout_engine.kernels.triton.adapters import BLOCK_ROWS, AdapterBatch, AdapterPair, AdapterTable
from rollout_engine.kernels.triton.block_copies import BlockCopies
from rollout_engine.kernels.truncation import most_likely
from rollout_engine.model.cuda.attention import CudaKVPool
from rollout_engine.model.cuda.copy_stream import CudaCopyStream
from rollout_engine.model.modules.geometry import LayerGeometry
from tests.fake_device.calls import CUDA
from tests.fake_device.device import FakeDevice
from tests.fake_device.plants import Plant

GUARDS_MEMORY = True
"""Harsh memory would be other memory to the fake device: `harsh_if_asked` leaves these tests out."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels have to run in Triton's interpreter")


def test_the_most_likely_tokens_are_found_without_waiting_and_ties_go_to_lower_ids():
    logits = torch.randint(-3, 3, (5, 40), generator=torch.Generator().manual_seed(1)).float()
    with FakeDevice() as device:
        on_device = logits.pin_memory().to(CUDA, non_blocking=True)
        found = most_likely(on_device, 7)
        assert device.waits_seen == []
        assert found.tolist() == most_likely(logits, 7).tolist()


def test_memory_of_an_adapter_that_is_given_up_waits_for_the_products_that_read_it():
    """Another adapter is on its way meanwhile, in the memory of the same stream, and waits for no step."""
    with FakeDevice() as device:
        device.timeline.order = "lazy"
        stream = CudaCopyStream(CUDA)
        with torch.cuda.stream(stream._stream):
            pair = AdapterPair.packed(torch.ones(16, 16), torch.ones(16, 16), 1.0, torch.float32).to(CUDA)
        table = AdapterTable(1, 16, [16], torch.float32, CUDA)
        table.set(0, [pair])
        x, out = torch.ones(2, 16).to(CUDA), torch.zeros(2, 16).to(CUDA)
        table.add(x, out, AdapterBatch.of(AdapterRows.of([0], [2], BLOCK_ROWS), CUDA))
        del pair
        table.set(0, [None])
        with torch.cuda.stream(stream._stream):
            AdapterPair.packed(torch.zeros(16, 16), torch.zeros(16, 16), 1.0, torch.float32).to(CUDA)
        device.finish()
        assert out.tolist() == [[256.0] * 16] * 2
    assert device.faults == []


@pytest.mark.parametrize(
    "plant",
    [
        None,
        Plant(
            CudaKVPool,
            "copy_blocks",
            "upload([np.array(pairs, np.int64)], self.device)",
            "[torch.tensor(pairs, device=self.device)]",
        ),
        Plant(
            BlockCopies,
            "__init__",
            "table.pin_memory().to(device, non_blocking=True)",
            "table.to(device, non_blocking=True)",
        ),
    ],
    ids=["as it is", "pairs are not pinned", "addresses are not pinned"],
)
def test_blocks_are_copied_without_a_wait(plant):
    layer = LayerGeometry(2, 1, 8, 16, scale=1.0, sliding_window=None, softcap=None, has_sinks=False)
    with FakeDevice() as device, plant.planted() if plant else nullcontext():
        pool = CudaKVPool([layer], num_blocks=4, block_size=4, dtype=torch.float32, device=CUDA)
        (keys, _) = pool.tensors()
        keys[1].fill_(3.0)
        pool.copy_blocks([(1, 2)])
        kinds = {wait.kind for wait in device.waits_seen}
        assert keys[2].min().item() == 3.0 and device.faults == []
    assert kinds == ({"unpinned copy"} if plant else set())
