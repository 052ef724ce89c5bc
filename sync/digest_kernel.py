# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
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

import functools

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
_LAUNCH_BYTES = 512 << 20
"""Once so much waits, it is launched: casts that somebody made only for their digests are let go."""
_ALIGNMENT = 16
_NUM_STAGES = tl.constexpr(4)
_NUM_COLUMNS = tl.constexpr(7)
"""Of a tensor: its first piece, address, bytes, the address to copy to or 0, and the three markers of what is not
finite."""
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
        self._waiting: list[Tensor] = []
        """To be launched, and what they are to be copied to."""
        self._num_bytes = 0
        self._rows: list[tuple[int, ...]] = []
        """Of those with pieces for the device: as the kernel reads them, but for the first column."""
        self._ends: list[tuple[Tensor, Tensor | None]] = []
        """uint8: what of them is for the host, and where it is to be copied."""
        self._shapes: list[tuple[int, int, torch.dtype]] = []
        """Of each tensor so far: its pieces for the device, the bytes after them, and its dtype."""
        self._told: list[Tensor] = []
        """uint8, on the device: results of all pieces of a launch."""
        self._rests: list[Tensor] = []
        """uint8, on the device: all bytes of a launch for the host."""

    def add(self, tensor: Tensor, out: Tensor | None = None) -> None:
        """Look at it, by the time of `launch` or `told`; until then it keeps its values.

        With `out`, which has its shape: copy it there too, cast nearest-even. Without a cast that is one pass over it.
        """
        if out is not None and not _copies_plainly(tensor, out):
            tensor, out = out.copy_(tensor), None
        plain = tensor.detach() if _is_plain(tensor) else tensor.detach().clone(memory_format=torch.contiguous_format)
        num_bytes = plain.nbytes
        rest = num_bytes % PIECE_BYTES
        rest = rest if rest <= _MAX_HOST_BYTES else 0
        count = -(-(num_bytes - rest) // PIECE_BYTES)
        if count:
            copy = 0 if out is None else out.data_ptr()
            self._rows.append((count, plain.data_ptr(), num_bytes - rest, copy, *_signed_markers(plain.dtype)))
        if rest:
            self._ends.append((_end_of(plain, rest), None if out is None else _end_of(out, rest)))
        self._shapes.append((count, rest, plain.dtype))
        self._waiting += [plain] if out is None else [plain, out]
        self._num_bytes += num_bytes
        if self._num_bytes >= _LAUNCH_BYTES:
            self.launch()

    def launch(self) -> None:
        """For all that were added."""
        if self._rows:
            table = np.array(self._rows, np.int64)
            counts = table[:, 0].copy()
            table[:, 0] = np.cumsum(counts) - counts
            owners = np.repeat(np.arange(len(counts)), counts)
            words = np.concatenate([_CONSTANTS, owners, table.reshape(-1)])
            there = torch.from_numpy(words).to(self._waiting[0].device)
            constants, pieces, tensors = there.split([len(_CONSTANTS), len(owners), table.size])
            results = torch.empty(len(owners), _NUM_RESULTS.value, dtype=torch.int64, device=there.device)
            with torch.cuda.device_of(there):
                _piece_kernel[(len(owners),)](constants, pieces, tensors, results, PIECE=PIECE_BYTES, num_warps=1)
            self._told.append(results.view(-1).view(torch.uint8))
        if self._ends:
            self._rests.append(torch.cat([end for end, _ in self._ends]))
        for end, copy in self._ends:
            if copy is not None:
                copy.copy_(end)
        self._waiting, self._rows, self._ends, self._num_bytes = [], [], [], 0

    def told(self) -> list[tuple[str, bool]]:
        """Of each tensor: digest as `sync.digests` has it, and whether all values are finite."""
        self.launch()
        come = [*self._told, *self._rests]
        content = torch.cat(come).cpu().numpy() if come else np.empty(0, np.uint8)
        num_pieces = sum(count for count, _, _ in self._shapes)
        results = content[: 8 * _NUM_RESULTS.value * num_pieces].view(np.uint64).reshape(-1, _NUM_RESULTS.value)
        pieces = np.ascontiguousarray(results[:, 1::-1]).astype(">u8")
        rests = content[results.nbytes :]
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


def _copies_plainly(tensor: Tensor, out: Tensor) -> bool:
    """Whether the kernel can copy one to the other."""
    forms = (tensor.dtype, tensor.device) == (out.dtype, out.device)
    return forms and _is_plain(tensor) and _is_plain(out)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the kernel can read and write it where it lies."""
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def _end_of(plain: Tensor, num_bytes: int) -> Tensor:
    return plain.view(-1)[plain.numel() - num_bytes // plain.itemsize :].view(torch.uint8)


@functools.cache
def _signed_markers(dtype: torch.dtype) -> tuple[int, ...]:
    return tuple(np.array(markers(dtype), np.uint64).view(np.int64).tolist())


@triton.jit
def _piece_kernel(constants_ptr, pieces_ptr, tensors_ptr, results_ptr, PIECE: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64)
    row = tensors_ptr + tl.load(pieces_ptr + piece) * _NUM_COLUMNS
    first = (piece - tl.load(row)) * PIECE
    start, copy = tl.load(row + 1) + first, tl.load(row + 3)
    num_bytes = tl.minimum(tl.load(row + 2) - first, PIECE)
    mask, carry, sign = _word(row + 4), _word(row + 5), _word(row + 6)
    copies = copy != 0
    copy += first
    words = tl.multiple_of(start.to(tl.pointer_type(tl.uint64)), 16)
    copied_words = tl.multiple_of(copy.to(tl.pointer_type(tl.uint64)), 16)
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
        tl.store(copied_words + block * 128 + inside, data, mask=copies)
        marked |= ((data & mask) + carry) & sign
        state = _added(state, data, keys)
        state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
    come = stripe < (num_bytes - 1 - num_blocks * 1024) // 64
    data = tl.load(words + num_blocks * 128 + inside, mask=come, other=0)
    tl.store(copied_words + num_blocks * 128 + inside, data, mask=come & copies)
    marked |= ((data & mask) + carry) & sign
    state = _added(state, data, tl.where(come, keys, 0))
    nth = tl.arange(0, 8)[None, None, None, :]
    byte = num_bytes - 64 + word[:, None, :, None] * 8 + nth  # words that need not be aligned
    last_bytes = tl.load(start.to(tl.pointer_type(tl.uint8)) + byte)
    tl.store(copy.to(tl.pointer_type(tl.uint8)) + byte, last_bytes, mask=copies)
    last = tl.sum(last_bytes.to(tl.uint64) << (nth * 8).to(tl.uint64), 3)
    marked |= ((last & mask) + carry) & sign
    state = _added(state, last, _word(constants_ptr + _LAST + word[:, None, :]))
    result = results_ptr + piece * _NUM_RESULTS
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
