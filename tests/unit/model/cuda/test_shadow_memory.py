"""Weights on their way to a device beside steps: nothing waits longer than it must, nothing is read too early."""

import queue
import threading
from functools import partial

import pytest
import torch
from torch import nn

from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.kernels.triton.copies import _Part
from rollout_engine.model.cuda.copy_stream import CudaCopyStream, HostCopyStream
from rollout_engine.model.cuda.pinned_upload import PinnedUpload
from rollout_engine.model.cuda.shadow_memory import CudaShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.transaction import WeightUpdater
from rollout_engine.weights.update import update_from_source
from sync import manifest, tensor_check, tensor_writer
from sync.digests import tensor_bytes, tensor_digest
from sync.manifest import describe, total_digest
from sync.tensor_check import CheckResult
from sync.tensor_writer import TensorWriter, WriteBatch
from tests.unit.weights.conftest import Steps

BUFFER = 64
SIZES = [0, 1, BUFFER // 4, BUFFER // 4 + 1, 5 * BUFFER // 4, 10 * BUFFER // 4 + 3]
"""Elements of float32, around the borders of buffers."""


class ThreadCopyStream(HostCopyStream):
    """Copies are made on a thread, in order, none before somebody waits for it or for a later one."""

    def __init__(self):
        self.num_asked = self.num_done = self.most_under_way = 0
        self._num_wanted = 0
        self._change = threading.Condition()
        self._copies = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def num_under_way(self):
        return self.num_asked - self.num_done

    def copy(self, out, source):
        with self._change:
            self.num_asked += 1
            self.most_under_way = max(self.most_under_way, self.num_under_way)
            self._copies.put((out, source))
            return partial(self._wait, self.num_asked)

    def lead_steps(self):
        self._wait(self.num_asked)

    def finish(self):
        """All that was asked for is done, and nothing more comes."""
        self.lead_steps()
        self._copies.put(None)
        self._thread.join()

    def _wait(self, count):
        with self._change:
            self._num_wanted = max(self._num_wanted, count)
            self._change.notify_all()
            self._change.wait_for(lambda: self.num_done >= count)

    def _run(self):
        for out, source in iter(self._copies.get, None):
            with self._change:
                self._change.wait_for(lambda: self._num_wanted > self.num_done)
                out.copy_(source)
                self.num_done += 1
                self._change.notify_all()


@pytest.fixture
def stream():
    stream = ThreadCopyStream()
    yield stream
    stream.finish()


@pytest.fixture
def is_there():
    """A function: whether the test calls a tensor one of the device's; those in its `places` are."""

    def is_there(tensor):
        return tensor.untyped_storage().data_ptr() in is_there.places

    is_there.places = set()
    return is_there


@pytest.fixture
def writer(stream, is_there):
    upload = PinnedUpload(stream, buffer_bytes=BUFFER)
    return TensorWriter(find_upload=lambda out: upload if is_there(out) else None)


@pytest.fixture
def on_device(is_there, monkeypatch):
    """A function that has a tensor be one of the device's."""
    if torch.cuda.is_available():
        pytest.skip("only the interpreter takes tensors of the host for a device's")
    monkeypatch.setattr(tensor_writer, "is_plain", lambda t: not is_there(t) and t.is_contiguous())
    for module in (manifest, tensor_writer, tensor_check):
        monkeypatch.setattr(module, "supports", is_there)
    return lambda tensor: is_there.places.add(tensor.untyped_storage().data_ptr()) or tensor


@pytest.fixture
def digest(stream):
    """A function: the digest of what lies in a place of the device once all that is under way has come."""

    def told(place):
        stream.lead_steps()
        return describe("", place).digest

    return told


def filled(size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_values_arrive_cast_under_their_digest(on_device, writer, digest, size):
    source = filled(size)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = on_device(torch.zeros(size, dtype=dtype))
        assert writer.write(out, source) == (tensor_digest(source.to(dtype)), True)
        assert digest(out) == tensor_digest(source.to(dtype))
        assert torch.equal(out, source.to(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_read_into_the_buffers_themselves(on_device, writer, digest, size):
    source, starts = filled(size), []
    content, out = tensor_bytes(source), on_device(torch.zeros(size))

    def fetch(piece, start):
        starts.append(start)
        piece[:] = content[start : start + len(piece)]

    assert writer.read(out, fetch) == CheckResult(tensor_digest(source), True)
    assert digest(out) == tensor_digest(source)
    assert starts == list(range(0, 4 * size, BUFFER))


def test_strided_tensors_are_uploaded(on_device, writer, digest):
    for source in (filled(600).view(20, 30).t(), filled(600).view(30, 20), torch.tensor(2.5)):
        for out in (torch.zeros(source.shape), torch.zeros(source.shape).t().contiguous().t()):
            arrived = writer.write(on_device(out), source)
            assert arrived == (tensor_digest(source), True) and digest(out) == tensor_digest(source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_on_the_device_already_is_cast_and_checked_there(on_device, writer, stream, dtype):
    batch, sources = WriteBatch(writer), {name: filled(size) for name, size in (("a", 100), ("b", 3), ("bad", 50))}
    sources["bad"][40] = float("inf")
    outs = {name: on_device(torch.zeros(len(source), dtype=dtype)) for name, source in sources.items()}
    for name, source in sources.items():
        batch.write(name, outs[name], on_device(source))
    wanted = {name: (tensor_digest(source.to(dtype)), name != "bad") for name, source in sources.items()}
    assert batch.results() == wanted and stream.num_asked == 0
    assert all(torch.equal(outs[name], source.to(dtype)) for name, source in sources.items())


@pytest.mark.parametrize("where", [0, 100, -1])
def test_what_is_not_finite_is_seen_before_the_upload(on_device, writer, where):
    source = torch.ones(200)
    source[where] = float("nan")
    assert writer.write(on_device(torch.zeros(200)), source) == (tensor_digest(source), False)
    assert writer.write(on_device(torch.zeros(200)), source, check_finite=False).digest == tensor_digest(source)


def test_a_piece_is_filled_while_two_before_it_are_not_copied_yet(on_device, writer, stream, digest):
    """The stream copies nothing before somebody waits: a third piece has to."""
    source, out = filled(3 * BUFFER // 4), on_device(torch.zeros(3 * BUFFER // 4))
    writer.write(on_device(out[: 2 * BUFFER // 4]), source[: 2 * BUFFER // 4])
    assert (stream.num_asked, stream.num_done) == (2, 0)
    writer.write(out, source)
    assert stream.most_under_way == 2
    assert digest(out) == tensor_digest(source)


def test_threads_share_the_buffers(on_device, writer, digest):
    sources = [filled(size) for size in range(50, 60)]
    outs = [on_device(torch.zeros(len(source))) for source in sources]
    barrier, arrived = threading.Barrier(len(sources)), {}

    def run(i):
        barrier.wait()
        arrived[i] = writer.write(outs[i], sources[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [arrived[i].digest for i in range(len(sources))] == [tensor_digest(source) for source in sources]
    assert [digest(out) for out in outs] == [tensor_digest(source) for source in sources]


def test_a_fill_that_fails_leaves_both_buffers_to_others(on_device, writer, digest):
    def fail(piece, start):
        raise OSError("cut")

    for _ in range(5):
        with pytest.raises(OSError, match="cut"):
            writer.read(on_device(torch.zeros(100)), fail)
    source, out = filled(100), on_device(torch.zeros(100))
    writer.write(out, source)
    assert digest(out) == tensor_digest(source)


@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_a_commit_has_what_was_still_under_way_when_it_was_called(on_device, writer, stream, monkeypatch, staging):
    fused = on_device(torch.zeros(3, 2, 7))  # whose halves are interleaved
    live = {"q": fused[:, 0], "k": fused[:, 1], "last": on_device(torch.zeros(2 * BUFFER // 4))}
    monkeypatch.setattr(stream, "allocate", lambda size: on_device(torch.zeros(size, dtype=torch.uint8)))
    updater = WeightUpdater.of(live, [], PackedWeights(nn.Module()), CudaShadowMemory(stream), writer=writer)
    for version in (1, 2):
        weights = {name: filled(view.numel()).view(view.shape) * version for name, view in live.items()}
        steps, done = Steps(), []
        enter = steps.boundary
        steps.boundary = lambda *args, enter=enter, done=done: done.append(stream.num_under_way) or enter(*args)
        options = UpdateOptions.from_values(staging=staging)
        report = update_from_source(updater, weights, steps, options)
        assert done[-1] >= 2, "both pieces of the last tensor"
        assert all(torch.equal(live[name], tensor) for name, tensor in weights.items())
        assert (report.digest, report.staging) == (updater.digest(), staging)


@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_weights_of_a_trainer_on_the_device_never_come_to_the_host(on_device, writer, stream, monkeypatch, staging):
    fused = on_device(torch.zeros(3, 2, 7))
    live = {"q": fused[:, 0], "k": fused[:, 1], "last": on_device(torch.zeros(2 * BUFFER // 4))}
    monkeypatch.setattr(stream, "allocate", lambda size: on_device(torch.zeros(size, dtype=torch.uint8)))
    weights = {name: on_device(filled(view.numel()).view(view.shape)) for name, view in live.items()}
    wanted = [describe(name, tensor) for name, tensor in weights.items()]
    for module in (tensor_writer, tensor_check):
        monkeypatch.setattr(module, "tensor_bytes", None)
    updater = WeightUpdater.of(live, [], PackedWeights(nn.Module()), CudaShadowMemory(stream), writer=writer)
    report = update_from_source(updater, weights, Steps(), UpdateOptions.from_values(staging=staging))
    assert report.digest == updater.digest() == total_digest(wanted) and stream.num_asked == 0
    assert all(torch.equal(live[name], tensor) for name, tensor in weights.items())
    weights["last"][3] = float("nan")
    with pytest.raises(WeightUpdateError, match="'last' has values that are NaN"):
        update_from_source(updater, weights, Steps(), UpdateOptions.from_values())


class Ordered(HostCopyStream):
    """Tells what was asked of it, and whether the copy had been launched by then."""

    def __init__(self, target):
        self.trace, self._target = [], target

    def lead_steps(self):
        self.trace.append(("lead", self._target.sum().item()))

    def wait_for_steps(self):
        self.trace.append(("wait", self._target.sum().item()))

    def enter(self):
        self.trace.append(("enter", self._target.sum().item()))
        return super().enter()


def test_a_commit_comes_after_what_was_staged_and_is_done_when_it_returns(interpreter):
    live, staged = (torch.full((100,), n, dtype=torch.uint8) for n in (0, 1))
    stream = Ordered(live)
    memory = CudaShadowMemory(stream)
    commit = memory.prepare_copy([(staged[:30], live[:30]), (staged[40:], live[40:])])
    assert stream.trace == [] and not live.any()
    with memory.beside_steps():
        pass
    commit()
    assert stream.trace == [("enter", 0), ("lead", 0), ("wait", 90)]
    staged.fill_(2)
    commit()
    assert live.tolist() == [2] * 30 + [0] * 10 + [2] * 60


def test_what_a_commit_launches_has_been_compiled_before(monkeypatch, interpreter):
    live, staged = (torch.full((100,), n, dtype=torch.uint8) for n in (0, 1))
    launched, run = [], _Part.run
    monkeypatch.setattr(_Part, "run", lambda self: launched.append(self._width) or run(self))
    commit = CudaShadowMemory(HostCopyStream()).prepare_copy([(staged[:32], live[:32]), (staged[33:], live[33:])])
    assert not live.any()
    prepared = set(launched)
    launched.clear()
    commit()
    assert set(launched) == prepared == {8, 1} and live.sum() == 99


def test_an_update_without_a_shadow_still_comes_after_what_was_staged():
    stream = Ordered(torch.zeros(1))
    CudaShadowMemory(stream).prepare_copy([])()
    assert [name for name, _ in stream.trace] == ["lead", "wait"]


def test_a_device_without_room_for_a_shadow_says_what_to_do():
    class Full(HostCopyStream):
        def allocate(self, num_bytes):
            raise torch.OutOfMemoryError("of 12 GiB")

    with pytest.raises(WeightUpdateError, match="no memory for a shadow .* .of 12 GiB.* staging='inplace'"):
        CudaShadowMemory(Full()).allocate(100)


def test_buffers_of_weights_are_pinned_so_that_no_copy_waits(monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "empty", lambda num_bytes, **options: asked.update(options))
    CudaCopyStream.buffer(object.__new__(CudaCopyStream), 8)
    assert asked == {"dtype": torch.uint8, "pin_memory": True}
