"""Memory of a device that another process can open: what happens around torch's calls, without a device."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sync import shared_memory
from sync.errors import SyncError
from sync.shared_memory import CudaMemory, MemoryHandle


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    return CudaMemory(torch.device("cuda", 0))


def test_memory_is_exported_once_as_long_as_it_lives(memory, monkeypatch):
    exports = []
    monkeypatch.setattr(shared_memory, "_handle_of", lambda storage: exports.append(storage.nbytes()) or len(exports))
    one, other = torch.zeros(10), torch.zeros(20)
    assert [memory.export(x.untyped_storage()) for x in (one, one[3:], other, one)] == [1, 1, 2, 1]
    del one
    memory.export(other.untyped_storage())
    assert len(memory._exported) == 1 and exports == [40, 80]


def test_memory_that_cannot_be_shared_is_refused_with_advice(memory, monkeypatch):
    def refuse(storage):
        raise RuntimeError("no handle")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", refuse)
    with pytest.raises(SyncError, match=r"cannot be shared .*\(no handle\)..*expandable_segments.*'nccl'"):
        memory.export(torch.zeros(1).untyped_storage())


def test_opening_that_torch_refuses_says_what_to_do(memory, monkeypatch):
    def refuse(*fields):
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse, raising=False)
    with pytest.raises(SyncError, match=r"cannot open .* on cuda:0 \(pidfd_getfd.*expandable_segments.*'nccl'"):
        memory.open(MemoryHandle(b"", 1, 0, b"", 0, b"", False))


def test_memory_is_closed_while_a_stream_without_work_is_current(memory, monkeypatch):
    current, closed_on = ["of steps"], []

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    class Opened:
        def __del__(self):
            closed_on.append(current[-1])

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(shared_memory, "_cuda", SimpleNamespace(Stream=lambda device: "new"))
    opened = [Opened(), Opened()]
    memory.close(opened)
    assert opened == [] and closed_on == ["new", "new"]
