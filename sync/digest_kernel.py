# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
"""Digests of tensors on a CUDA device, computed there by Triton: 24 bytes of each piece reach the host.

Every piece has a program of its own, which follows the specification of XXH3 (128 bits, no seed, the usual secret):

    state    8 words of 64 bits                      a block is [16 stripes, 8 words]: 1,024 bytes
    block    word w of stripe s adds  w  to the word of the state beside its own,
             and  low half x high half of (w ^ key[s])  to its own: sums, in any order, so a block is added at once
    after each whole block the state is scrambled; then the rest follows, and the last 64 bytes under keys of their own

Ends of tensors that are shorter than this is meant for (240 bytes) are hashed on the host.

The kernel is here and not with the others because both ends of a transport need it: a trainer that sends weights has
nothing of ours but `sync`. Triton is optional and slow to import, so `_loaded_kernel` imports it when a device's first
digest is wanted; until then the kernel below is plain Python that nothing calls.
"""

import functools
import threading
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from sync.digests import PIECE_BYTES
from sync.finite import is_finite, markers

tl: Any = None
"""`triton.language`, once `_loaded_kernel` has imported it."""
_LOADING = threading.Lock()
_MAX_HOST_BYTES = 240
"""XXH3 hashes up to this many bytes in other ways."""
_LAUNCH_BYTES = 512 << 20
"""Pending tensors are launched at this size, so that casts which were made only for their digests are freed."""
_ALIGNMENT = 16
_NUM_RESULTS = 3
"""Results of a piece: low half, high half, whether a value is not finite."""
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


def _words(start: int, count: int) -> NDArray[np.int64]:
    """`count` words of the secret, from byte `start` on."""
    return np.frombuffer(_SECRET, np.int64, count, start)


_CONSTANTS = np.concatenate(
    [
        *(_words(8 * stripe, 8) for stripe in range(16)),  # keys, laid out as a block is
        _words(128, 8),  # scramble
        _words(121, 8),  # keys of the last 64 bytes
        _words(11, 8),  # keys of the low half
        _words(117, 8),  # and of the high half
        np.array(_START, np.uint64).view(np.int64),  # the first state
    ]
)


class DeviceCheck:
    """Checks tensors of one device in order; results are returned at once. Uses the current stream of each call."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        """Tensors to be launched, and those that they are copied to: kept until then."""
        self._num_bytes = 0
        self._rows: list[tuple[int, ...]] = []
        """A row of the kernel's table for each pending tensor with pieces: their number (later that of the first one),
        address, bytes, the address to copy to or 0, and the three markers of values that are not finite."""
        self._ends: list[tuple[Tensor, Tensor | None]] = []
        """uint8 ends of pending tensors that are hashed on the host, and the host memory that they are copied to."""
        self._shapes: list[tuple[int, int, torch.dtype]] = []
        """For each tensor so far: the number of its pieces, the bytes after them, and its dtype."""
        self._piece_results: list[Tensor] = []
        """uint8, on the device: results of all pieces of a launch."""
        self._end_bytes: list[Tensor] = []
        """uint8, on the device: all ends of a launch."""

    def add(self, tensor: Tensor, out: Tensor | None = None) -> None:
        """Check `tensor`, which has to keep its values until `launch` or `results`.

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
        self._pending += [plain] if out is None else [plain, out]
        self._num_bytes += num_bytes
        if self._num_bytes >= _LAUNCH_BYTES:
            self.launch()

    def launch(self) -> None:
        """Launch the check of all pending tensors."""
        if self._rows:
            table = np.array(self._rows, np.int64)
            counts = table[:, 0].copy()
            table[:, 0] = np.cumsum(counts) - counts
            owners = np.repeat(np.arange(len(counts)), counts)
            words = np.concatenate([_CONSTANTS, owners, table.reshape(-1)])
            there = torch.from_numpy(words).to(self._pending[0].device)
            constants, pieces, tensors = there.split([len(_CONSTANTS), len(owners), table.size])
            results = torch.empty(len(owners), _NUM_RESULTS, dtype=torch.int64, device=there.device)
            kernel = _loaded_kernel()
            with torch.cuda.device_of(there):
                kernel[(len(owners),)](constants, pieces, tensors, results, PIECE=PIECE_BYTES, num_warps=1)
            self._piece_results.append(results.view(-1).view(torch.uint8))
        if self._ends:
            self._end_bytes.append(torch.cat([end for end, _ in self._ends]))
        for end, copy in self._ends:
            if copy is not None:
                copy.copy_(end)
        self._pending, self._rows, self._ends, self._num_bytes = [], [], [], 0

    def results(self) -> list[tuple[str, bool]]:
        """The digest of each tensor, as `sync.digests` has it, and whether all its values are finite."""
        self.launch()
        parts = [*self._piece_results, *self._end_bytes]
        content = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.uint8)
        num_pieces = sum(count for count, _, _ in self._shapes)
        results = content[: 8 * _NUM_RESULTS * num_pieces].view(np.uint64).reshape(-1, _NUM_RESULTS)
        pieces = np.ascontiguousarray(results[:, 1::-1]).astype(">u8")
        ends = content[results.nbytes :]
        found = []
        for count, rest, dtype in self._shapes:
            digest = xxhash.xxh3_128(pieces[:count].tobytes())
            finite = not results[:count, 2].any()
            if rest:
                digest.update(xxhash.xxh3_128_digest(ends[:rest].data))
                finite = finite and is_finite(ends[:rest].data, dtype)
            found.append((digest.hexdigest(), finite))
            pieces, results, ends = pieces[count:], results[count:], ends[rest:]
        return found


def _copies_plainly(tensor: Tensor, out: Tensor) -> bool:
    """Whether the kernel can copy `tensor` to `out`."""
    forms = (tensor.dtype, tensor.device) == (out.dtype, out.device)
    return forms and _is_plain(tensor) and _is_plain(out)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the kernel can read and write the tensor in place."""
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def _end_of(plain: Tensor, num_bytes: int) -> Tensor:
    return plain.view(-1)[plain.numel() - num_bytes // plain.itemsize :].view(torch.uint8)


@functools.cache
def _signed_markers(dtype: torch.dtype) -> tuple[int, ...]:
    return tuple(np.array(markers(dtype), np.uint64).view(np.int64).tolist())


def _loaded_kernel() -> Any:
    """Import Triton, and compile `_piece_kernel` and the functions that it calls."""
    global tl, _add_stripes, _merge_state, _word, _piece_kernel
    with _LOADING:
        if tl is None:
            import triton
            import triton.language as language

            tl = language
            _add_stripes, _merge_state, _word = triton.jit(_add_stripes), triton.jit(_merge_state), triton.jit(_word)
            _piece_kernel = triton.jit(_piece_kernel)
    return _piece_kernel


def _piece_kernel(constants_ptr, pieces_ptr, tensors_ptr, results_ptr, PIECE: "tl.constexpr"):
    NUM_COLUMNS, NUM_RESULTS = 7, 3
    SCRAMBLE, LAST, LOW, HIGH, STATE = 128, 136, 144, 152, 160  # offsets of words in _CONSTANTS
    piece = tl.program_id(0).to(tl.int64)
    row = tensors_ptr + tl.load(pieces_ptr + piece) * NUM_COLUMNS
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
    scramble = _word(constants_ptr + SCRAMBLE + word)
    state = _word(constants_ptr + STATE + word)
    inside = stripe * 8 + word[:, None, :]
    keys = _word(constants_ptr + inside)
    marked = keys * 0
    num_blocks = (num_bytes - 1) // 1024
    for block in tl.range(0, num_blocks, num_stages=4):
        data = tl.load(words + block * 128 + inside)
        tl.store(copied_words + block * 128 + inside, data, mask=copies)
        marked |= ((data & mask) + carry) & sign
        state = _add_stripes(state, data, keys)
        state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
    in_rest = stripe < (num_bytes - 1 - num_blocks * 1024) // 64
    data = tl.load(words + num_blocks * 128 + inside, mask=in_rest, other=0)
    tl.store(copied_words + num_blocks * 128 + inside, data, mask=in_rest & copies)
    marked |= ((data & mask) + carry) & sign
    state = _add_stripes(state, data, tl.where(in_rest, keys, 0))
    nth = tl.arange(0, 8)[None, None, None, :]
    byte = num_bytes - 64 + word[:, None, :, None] * 8 + nth  # words that need not be aligned
    last_bytes = tl.load(start.to(tl.pointer_type(tl.uint8)) + byte)
    tl.store(copy.to(tl.pointer_type(tl.uint8)) + byte, last_bytes, mask=copies)
    last = tl.sum(last_bytes.to(tl.uint64) << (nth * 8).to(tl.uint64), 3)
    marked |= ((last & mask) + carry) & sign
    state = _add_stripes(state, last, _word(constants_ptr + LAST + word[:, None, :]))
    result = results_ptr + piece * NUM_RESULTS
    length = num_bytes.to(tl.uint64)
    low = _merge_state(state, _word(constants_ptr + LOW + word), length * 0x9E3779B185EBCA87)
    inverse = (length * 0xC2B2AE3D27D4EB4F) ^ 0xFFFFFFFFFFFFFFFF
    high = _merge_state(state, _word(constants_ptr + HIGH + word), inverse)
    tl.store(result, low.to(tl.int64, bitcast=True))
    tl.store(result + 1, high.to(tl.int64, bitcast=True))
    tl.store(result + 2, tl.max((marked != 0).to(tl.int64)))


def _add_stripes(state, data, keys):
    """Add stripes [4, n, 2], under keys of that shape, to `state` [4, 2]."""
    even, odd = tl.split(data)
    keyed = data ^ keys
    return state + tl.sum(tl.join(odd, even) + (keyed & 0xFFFFFFFF) * (keyed >> 32), 1)


def _merge_state(state, keys, start):
    """Fold the state into 64 bits."""
    one, other = tl.split(state ^ keys)
    mixed = start + tl.sum((one * other) ^ tl.umulhi(one, other), 0)
    mixed = (mixed ^ (mixed >> 37)) * 0x165667919E3779F9
    return mixed ^ (mixed >> 32)


def _word(ptr):
    return tl.load(ptr).to(tl.uint64, bitcast=True)
