"""Mirror of `StateChunks` in `state_chunks.h`."""

import ctypes
from ctypes import c_int64, c_void_p

from rollout_engine.kernels.state_chunks import StateChunks


class ChunkTable(ctypes.Structure):
    """Address and sizes of the arrays of a `StateChunks`, which has to outlive it."""

    _fields_ = [("table", c_void_p), ("num_chunks", c_int64), ("num_writes", c_int64)]

    @classmethod
    def of(cls, chunks: StateChunks) -> "ChunkTable":
        """The table of `chunks`."""
        return cls(chunks.address, chunks.num_chunks, len(chunks.write_slots))
