"""Memory that leaves the device while tensors stay what they are."""

import pytest
import torch

from rollout_engine.base.errors import LifecycleError, StepMemoryError
from rollout_engine.model.cuda import memory
from rollout_engine.model.cuda.memory import ReleasableMemory

CHUNK = 64


def tensors():
    """Storages around the borders of chunks; two tensors share one."""
    sizes = (CHUNK // 4, 1, 3 * CHUNK, 0, 77)
    made = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    return [*made, made[2][5:9], torch.arange(3, dtype=torch.int8)]


@pytest.mark.parametrize("times", [1, 3])
def test_values_that_are_kept_come_back_at_every_sleep(times):
    held = tensors()
    kept = ReleasableMemory(held, chunk_bytes=CHUNK)
    awake = kept.num_bytes
    for n in range(times):
        expected = [tensor.clone() for tensor in held]
        kept.release(keep=True)
        assert kept.num_bytes == 0 and all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
        assert kept.restore() and kept.num_bytes == awake
        assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
        held[2].mul_(n + 2)
    assert not kept.restore()


def test_host_memory_is_taken_once_and_is_as_much_as_the_values(monkeypatch):
    held, taken = tensors(), []
    kept, host_memory = ReleasableMemory(held, chunk_bytes=CHUNK), memory._host_memory
    monkeypatch.setattr(memory, "_host_memory", lambda *args: taken.append(args) or host_memory(*args))
    for _ in range(2):
        kept.release(keep=True)
        kept.restore()
    assert sum(size for size, _ in taken) == kept.num_bytes
    assert max(size for size, _ in taken) == CHUNK and not any(pinned for _, pinned in taken)


def test_what_is_forgotten_comes_back_as_zeros():
    held = tensors()
    kept = ReleasableMemory(held, chunk_bytes=CHUNK)
    kept.release()
    kept.restore()
    assert not any(tensor.any() for tensor in held)


def test_a_deeper_sleep_forgets_what_was_kept_and_a_lighter_one_does_not():
    held = tensors()
    kept, expected = ReleasableMemory(held, chunk_bytes=CHUNK), [tensor.clone() for tensor in held]
    for keep in (True, True):
        kept.release(keep=keep)
    kept.restore()
    assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
    for keep in (True, False, True):
        kept.release(keep=keep)
    kept.restore()
    assert not any(tensor.any() for tensor in held)


def test_a_host_without_room_keeps_the_values_where_they_are(monkeypatch):
    def fail(num_bytes, pinned):
        raise RuntimeError("pin failed")

    held = tensors()
    kept, expected = ReleasableMemory(held, chunk_bytes=CHUNK), [tensor.clone() for tensor in held]
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_host_memory", fail)
        with pytest.raises(LifecycleError, match=r"the host has no memory for .* \(pin failed\).* level 2"):
            kept.release(keep=True)
    assert not kept.restore()
    assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))


class Storage:
    """Of a device that may be full."""

    device = torch.device("cpu")
    is_full = False

    def __init__(self, storage):
        self.storage, self.data_ptr, self.nbytes = storage, storage.data_ptr, storage.nbytes
        self.untyped_storage = lambda: self

    def resize_(self, size):
        if self.is_full and size:
            raise torch.OutOfMemoryError("of 12 GiB")
        self.storage.resize_(size)


def test_a_device_without_room_gives_back_what_there_was_and_can_be_asked_again(monkeypatch):
    first, second = (Storage(torch.ones(n, dtype=torch.uint8).untyped_storage()) for n in (5, 6))
    monkeypatch.setattr(memory, "_bytes_of", lambda each: torch.empty(0, dtype=torch.uint8).set_(each.storage))
    kept = ReleasableMemory([first, second], chunk_bytes=CHUNK)
    kept.release(keep=True)
    second.is_full = True
    with pytest.raises(StepMemoryError, match="no memory for 11 bytes that were released .of 12 GiB"):
        kept.restore()
    assert kept.num_bytes == 0
    second.is_full = False
    assert kept.restore()
    assert [memory._bytes_of(each).tolist() for each in (first, second)] == [[1] * 5, [1] * 6]
