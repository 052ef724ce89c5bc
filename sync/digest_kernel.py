# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
"""Digests of tensors on a device, made there by Triton: of each piece 24 bytes come to the host.

Every piece has a program of its own, which follows the specification of XXH3 (128 bits, no seed, the usual secret):

    state    8 words of 64 bits                      a block is [16 stripes, 8 words]: 1,024 bytes
    block    word w of stripe s adds  w  to the word of the state beside its own,
             and  low half x high half of (w ^ key[s])  to its own: sums, in any order, so a block is added at once
    after each whole block the state is scrambled; then comes the rest, and the last 64 bytes under keys of their own

What is shorter than that is meant for (240 bytes: the end of a tensor, or a small one) is hashed on the host.
It is here and not with the other kernels because both ends of a transport need it: a trainer has nothing of ours but
`sync`, and nothing to set up. Imported only where there is Triton.
"""

import numpy as np
import torch
import triton
import triton.language as tl
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from sync.digests import PIECE_BYTES
from sync.finite import is_finite, markers

_MAX_HOST_BYTES = 240
"""XXH3 hashes what is no longer in other ways."""
_LAUNCH_BYTES = 256 << 20
"""Once so much waits, it is launched: casts that somebody made only for their digests are let go."""
_ALIGNMENT = 16
_NUM_STAGES = tl.constexpr(4)
_NUM_COLUMNS = tl.constexpr(5)
"""Address, bytes, and the three markers of values that are not finite."""
_NUM_RESULTS = tl.constexpr(3)
"""Low half, high half, not finite."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
"""The state before the first byte."""
_KEYS, _SCRAMBLE, _LAST, _LOW, _HIGH, _STATE = (tl.constexpr(start) for start in (0, 128, 136, 144, 152, 160))
"""Where words of `_CONSTANTS` begin."""


def _words(start: int, count: int) -> NDArray[np.int64]:
    """Of the secret, from a byte on."""
    return np.frombuffer(_SECRET, np.int64, count, start)


_CONSTANTS = np.concatenate(
    [
        *(_words(8 * stripe, 8) for stripe in range(16)),  # laid out as a block is
        _words(128, 8),
        _words(121, 8),
        _words(11, 8),
        _words(117, 8),
        np.array(_START, np.uint64).view(np.int64),
    ]
)


class DeviceLooks:
    """At tensors of one device, in order; they are told at once. Works on the stream that is current at each call."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        """Not launched."""
        self._num_bytes = 0
        self._shapes: list[tuple[int, int, torch.dtype]] = []
        """Of each tensor: its pieces with a program, the bytes after them, and its dtype."""
        self._told: list[Tensor] = []
        """uint8, on the device: results of the pieces of a launch, and bytes for the host."""
        self._rests: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Look at it, by the time of `told` at the latest; until then it keeps its values."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.data_ptr() % _ALIGNMENT:
            flat = flat.clone()
        rest = flat.numel() % PIECE_BYTES
        rest = rest if rest <= _MAX_HOST_BYTES else 0
        self._shapes.append((-(-(flat.numel() - rest) // PIECE_BYTES), rest, tensor.dtype))
        self._tensors.append(flat)
        self._num_bytes += flat.numel()
        if self._num_bytes >= _LAUNCH_BYTES:
            self._launch()

    def told(self) -> list[tuple[str, bool]]:
        """Of each tensor: digest as `sync.digests` has it, and whether all values are finite."""
        if self._tensors:
            self._launch()
        come = torch.cat(self._told + self._rests).cpu().numpy() if self._told else np.empty(0, np.uint8)
        num_pieces = sum(count for count, _, _ in self._shapes)
        results = come[: 8 * _NUM_RESULTS.value * num_pieces].view(np.uint64).reshape(-1, _NUM_RESULTS.value)
        pieces = np.ascontiguousarray(results[:, 1::-1]).astype(">u8")
        rests = come[results.nbytes :]
        found = []
        for count, rest, dtype in self._shapes:
            digest = xxhash.xxh3_128(pieces[:count].tobytes())
            finite = not results[:count, 2].any()
            if rest:
                digest.update(xxhash.xxh3_128_digest(rests[:rest].data))
                finite = finite and is_finite(rests[:rest].data, dtype)
            found.append((digest.hexdigest(), finite))
            pieces, results, rests = pieces[count:], results[count:], rests[rest:]
        return found

    def _launch(self) -> None:
        tensors, shapes = self._tensors, self._shapes[-len(self._tensors) :]
        rows = [_rows(*pair) for pair in zip(tensors, shapes, strict=True)]
        table = np.concatenate([_CONSTANTS, *(row.reshape(-1) for row in rows)])
        num_pieces = sum(map(len, rows))
        device = tensors[0].device
        results = torch.empty(num_pieces, _NUM_RESULTS.value, dtype=torch.int64, device=device)
        if num_pieces:
            there = torch.from_numpy(table).to(device)
            with torch.cuda.device_of(there):
                _piece_kernel[(num_pieces,)](there, there[len(_CONSTANTS) :], results, num_warps=1)
        self._told.append(results.view(-1).view(torch.uint8))
        pairs = zip(tensors, shapes, strict=True)
        ends = [flat[len(flat) - rest :] for flat, (_, rest, _) in pairs if rest]
        if ends:
            self._rests.append(torch.cat(ends))
        self._tensors, self._num_bytes = [], 0


def _rows(flat: Tensor, shape: tuple[int, int, torch.dtype]) -> NDArray[np.int64]:
    """[pieces, columns] of a tensor's pieces with a program."""
    count, rest, dtype = shape
    starts = np.arange(count, dtype=np.int64) * PIECE_BYTES
    rows = np.empty((count, _NUM_COLUMNS.value), np.int64)
    rows[:, 0] = flat.data_ptr() + starts
    rows[:, 1] = np.minimum(flat.numel() - rest - starts, PIECE_BYTES)
    rows[:, 2:] = np.array(markers(dtype), np.uint64).view(np.int64)
    return rows


@triton.jit
def _piece_kernel(constants_ptr, pieces_ptr, results_ptr):
    row = pieces_ptr + tl.program_id(0).to(tl.int64) * _NUM_COLUMNS
    start, num_bytes = tl.load(row), tl.load(row + 1)
    mask, carry, sign = _word(row + 2), _word(row + 3), _word(row + 4)
    words = tl.multiple_of(start.to(tl.pointer_type(tl.uint64)), 16)
    stripe = tl.arange(0, 16)[None, :, None]
    word = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    scramble = _word(constants_ptr + _SCRAMBLE + word)
    state = _word(constants_ptr + _STATE + word)
    inside = stripe * 8 + word[:, None, :]
    keys = _word(constants_ptr + _KEYS + inside)
    marked = keys * 0
    num_blocks = (num_bytes - 1) // 1024
    for block in tl.range(0, num_blocks, num_stages=_NUM_STAGES):
        data = tl.load(words + block * 128 + inside)
        marked |= ((data & mask) + carry) & sign
        state = _added(state, data, keys)
        state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
    come = stripe < (num_bytes - 1 - num_blocks * 1024) // 64
    data = tl.load(words + num_blocks * 128 + inside, mask=come, other=0)
    marked |= ((data & mask) + carry) & sign
    state = _added(state, data, tl.where(come, keys, 0))
    last = _bytes_at(start + num_bytes - 64, word[:, None, :])
    marked |= ((last & mask) + carry) & sign
    state = _added(state, last, _word(constants_ptr + _LAST + word[:, None, :]))
    result = results_ptr + tl.program_id(0).to(tl.int64) * _NUM_RESULTS
    length = num_bytes.to(tl.uint64)
    low = _merged(state, _word(constants_ptr + _LOW + word), length * 0x9E3779B185EBCA87)
    inverse = (length * 0xC2B2AE3D27D4EB4F) ^ 0xFFFFFFFFFFFFFFFF
    high = _merged(state, _word(constants_ptr + _HIGH + word), inverse)
    tl.store(result, low.to(tl.int64, bitcast=True))
    tl.store(result + 1, high.to(tl.int64, bitcast=True))
    tl.store(result + 2, tl.max((marked != 0).to(tl.int64)))


@triton.jit
def _added(state, data, keys):
    """`state` [4, 2] after stripes [4, n, 2] under keys of that shape."""
    even, odd = tl.split(data)
    keyed = data ^ keys
    return state + tl.sum(tl.join(odd, even) + (keyed & 0xFFFFFFFF) * (keyed >> 32), 1)


@triton.jit
def _merged(state, keys, start):
    """All of the state in 64 bits."""
    one, other = tl.split(state ^ keys)
    mixed = start + tl.sum((one * other) ^ tl.umulhi(one, other), 0)
    mixed = (mixed ^ (mixed >> 37)) * 0x165667919E3779F9
    return mixed ^ (mixed >> 32)


@triton.jit
def _word(ptr):
    return tl.load(ptr).to(tl.uint64, bitcast=True)


@triton.jit
def _bytes_at(address, word):
    """Words of 64 bits from an address that need not be aligned."""
    byte = tl.arange(0, 8)
    bytes_of = address.to(tl.pointer_type(tl.uint8)) + word[:, :, :, None] * 8 + byte[None, None, None, :]
    return tl.sum(tl.load(bytes_of).to(tl.uint64) << (byte * 8)[None, None, None, :].to(tl.uint64), 3)
