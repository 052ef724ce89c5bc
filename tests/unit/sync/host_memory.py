"""Memory of the host in place of a device's."""

import mmap
import weakref

import torch

from sync.shared_memory import MemoryHandle


class HostMemory:
    """Buffers as files; a handle is a file's name."""

    name = "host"

    def __init__(self, directory):
        self.directory, self.names, self.num_opened, self.trace = directory, {}, 0, []
        self.num_closed = self.num_kept = 0

    def allocate(self, num_bytes):
        path = self.directory / f"buffer{len(self.names)}"
        path.write_bytes(bytes(num_bytes))
        buffer = self._map(path)
        self.names[buffer.data_ptr()] = path.name
        return buffer

    def shares(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.names

    def export(self, storage):
        return MemoryHandle(self.names[storage.data_ptr()].encode(), storage.nbytes(), 0, b"", 0, b"", False)

    def open(self, handle):
        self.num_opened += 1
        return self._map(self.directory / handle.storage.decode())

    def close(self, opened):
        references = [weakref.ref(memory) for memory in opened]
        opened.clear()
        self.num_closed += len(references)
        self.num_kept += sum(reference() is not None for reference in references)

    def mark(self):
        number = sum(entry[0] == "mark" for entry in self.trace)
        self.trace.append(("mark", number))
        return lambda seconds: self.trace.append(("wait", number)) is None

    def _map(self, path):
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def shared(memory, *tensors):
    """Copies of the tensors one after the other in one piece of `memory`."""
    buffer = memory.allocate(sum(tensor.nbytes for tensor in tensors) or 1)
    copies, start = [], 0
    for tensor in tensors:
        place = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor))
        start += tensor.nbytes
    return copies
