"""Writes tensors to their destination and checks them on the way: digest and finiteness, in one pass over memory.

    in the host's memory            for each piece:   write ──> digest ──> finiteness
    with a copy function            for each piece:   digest of the source ──> copy past the cache, largest bits
    from the host to a device       for each piece:   write to a pinned buffer ──> digest ──> finiteness ──> upload
    on a device already             copied there, cast nearest-even, and checked there

A strided tensor of the host is written whole and read again.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from sync.digests import PIECE_BYTES, Digest, tensor_bytes
from sync.errors import ManifestMismatch
from sync.finite import largest_bits
from sync.pieces import Part, PartCheck, sections
from sync.tensor_check import CheckResult, HostCheck, TensorCheck, supports

Copy: TypeAlias = Callable[[int, int, int, int], int]
"""`copy(out, source, num_bytes, width)` copies between two addresses, elements `width` bytes wide. Returns the largest
of their bits without the sign."""
Fill: TypeAlias = Callable[[memoryview, int], None]
"""`fill(piece, start)` writes the row-major bytes of a tensor from byte `start` on into `piece`."""
Upload: TypeAlias = Callable[[Tensor, Fill], None]
"""`upload(out, fill)` has `fill` write the bytes of `out`, whole elements, in order, into buffers of its own, which it
copies to `out`; copies may still be under way when it returns. Several threads may call it."""


class Written(NamedTuple):
    """Record of the bytes that a sender has written for a tensor."""

    digests: list[bytes]
    """Digest of each piece."""
    sources: list[bytes]
    """Digests of the source of each cast piece, if that is narrower."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes before and after the cast, which may be the same."""


class TensorWriter:
    """Writes tensors, and returns records of them. Several threads may share one.

    Args:
        find_copy: returns the function that copies if no cast is needed, or None for numpy's; called for each
            tensor, so that kernels need not be loaded before.
        find_upload: returns the function that writes to a tensor outside the host's plain memory, or None for torch's.
    """

    def __init__(
        self,
        *,
        find_copy: Callable[[], Copy | None] = lambda: None,
        find_upload: Callable[[Tensor], Upload | None] = lambda out: None,
    ) -> None:
        self._find_copy, self._find_upload = find_copy, find_upload

    def write(self, out: Tensor, tensor: Tensor, *, check_finite: bool = True) -> CheckResult:
        """Write `tensor`, cast nearest-even, into `out`, and check the content of `out` afterwards.

        The work is done on the calling thread.
        """
        if out.shape != tensor.shape:  # copies below are by address
            raise ManifestMismatch(
                f"A tensor of shape {list(tensor.shape)} cannot be written to one of {list(out.shape)}."
            )
        check = HostCheck(out.dtype, check_finite=check_finite)
        if is_plain(out) and is_plain(tensor):
            copy = self._find_copy() if out.dtype == tensor.dtype else None
            if copy is not None:
                return _copy_tensor(out, tensor, copy, check_finite=check_finite)
            check.update(tensor_bytes(out), _writer(out, tensor))
        elif not is_plain(out) and (upload := self._find_upload(out)) is not None:
            values = _in_a_row(tensor.detach().cpu())

            def fill(memory: memoryview, start: int) -> None:
                piece = torch.frombuffer(memory, dtype=out.dtype)
                first = start // out.itemsize
                check.update(memory, _writer(piece, values[first : first + len(piece)]))

            upload(out, fill)
        else:
            out.copy_(tensor)
            check.update(tensor_bytes(out.detach().cpu().contiguous()))
        return check.result

    def write_changed(self, out: Tensor, tensor: Tensor, known: "Written | None" = None) -> "Written":
        """Write `tensor`, cast nearest-even, into `out`, which is plain, but for pieces that `out` has already.

        `known`: the record of the last write to `out`, None if it is new. Returns the new record.
        """
        on_host = tensor.detach() if tensor.is_cpu else tensor.detach().to(out.dtype).cpu()  # cast before it travels
        values, width, copy = _in_a_row(on_host), out.itemsize, self._find_copy()
        from_width, is_cast, origin = values.itemsize, values.dtype != out.dtype, values.data_ptr()
        memory, end = tensor_bytes(values), len(values)
        # Casts to a wider dtype keep all values apart: a piece has changed exactly if its source has.
        is_widened = from_width < width
        written = Written([], [], (values.dtype, out.dtype))
        before = known if known is not None and known.dtypes == written.dtypes else Written([], [], written.dtypes)
        for i, start in enumerate(range(0, out.nbytes, PIECE_BYTES)):
            first, last = start // width, min((start + PIECE_BYTES) // width, end)
            piece, address = memory[first * from_width : last * from_width], origin + first * from_width
            if is_widened:
                written.sources.append(xxhash.xxh3_128_digest(piece))
                if before.sources[i : i + 1] == written.sources[i:]:
                    written.digests.append(before.digests[i])
                    continue
            if is_cast:
                cast = values[first:last].to(out.dtype)
                piece, address = tensor_bytes(cast), cast.data_ptr()
            digest = xxhash.xxh3_128_digest(piece)
            written.digests.append(digest)
            if i < len(before.digests) and before.digests[i] == digest:
                continue
            if copy is not None:
                copy(out.data_ptr() + start, address, len(piece), width)
            else:
                tensor_bytes(out)[start : start + len(piece)] = piece
        return written

    def write_part(self, out: Tensor, tensor: Tensor, part: Part) -> CheckResult:
        """Write the pieces of `part` of `tensor`, which has the dtype of `out`, and check the result.

        Both are the host's. The digest is the manifest's if all these pieces have theirs.
        """
        source = tensor.detach().contiguous()
        memory, check = tensor_bytes(source), PartCheck(part)
        copy = self._find_copy() if out.is_contiguous() else None
        for start, end in part.ranges:
            piece = memory[start:end]
            if copy is not None:
                check.add_digest(start, piece)
                check.add_bits(copy(out.data_ptr() + start, source.data_ptr() + start, end - start, out.itemsize))
            else:
                check.add(start, piece)
                _place(out, start, piece)
        return check.result

    def read_part(self, out: Tensor, fill: Fill, part: Part) -> CheckResult:
        """Have `fill` write the pieces of `part` to `out`, which is the host's, and check them as `write_part` does."""
        buffer, check = memoryview(bytearray(PIECE_BYTES)), PartCheck(part)
        memory = tensor_bytes(out) if out.is_contiguous() else None
        for start, end in part.ranges:
            piece = buffer[: end - start] if memory is None else memory[start:end]
            fill(piece, start)
            check.add(start, piece)
            if memory is None:
                _place(out, start, piece)
        return check.result

    def read(self, out: Tensor, fill: Fill) -> CheckResult:
        """Have `fill` write the bytes of `out`, and check them."""
        check = HostCheck(out.dtype, check_finite=True)

        def fill_and_check(memory: memoryview, first: int) -> None:
            check.update(memory, lambda start, end: fill(memory[start:end], first + start))

        if is_plain(out):
            fill_and_check(tensor_bytes(out), 0)
        elif (upload := self._find_upload(out)) is not None:
            upload(out, fill_and_check)
        else:
            on_host = torch.empty(out.shape, dtype=out.dtype)
            fill(tensor_bytes(on_host), 0)
            return self.write(out, on_host)
        return check.result


HOST_WRITER = TensorWriter()
"""Copies as numpy and torch do."""


class WriteBatch:
    """Writes several tensors by one `writer`, and collects the results: a device is waited for once, at the end."""

    def __init__(self, writer: TensorWriter) -> None:
        self._writer = writer
        self._done: dict[str, CheckResult] = {}
        self._pending: list[str] = []
        """Names of the tensors in `_check`."""
        self._check = TensorCheck(check_finite=True)

    def write(self, name: str, out: Tensor, tensor: Tensor, part: Part | None = None) -> None:
        """Write `tensor`, cast nearest-even, into `out`; on a device on its current stream, without waiting.

        `part`: only these pieces of it.
        """
        if part is not None and out.is_cpu:
            self._done[name] = self._writer.write_part(out, tensor.to("cpu", out.dtype), part)
        elif supports(out) and supports(tensor):
            out.copy_(tensor)
            self._check.add(out)
            self._pending.append(name)
        else:
            self._done[name] = self._writer.write(out, tensor)

    def write_group(self, tensors: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """`write` each (name, out, tensor); on a device, one pass copies and checks those that need no cast.

        The tensors may change once this returns.
        """
        for name, out, tensor in tensors:
            if supports(out) and supports(tensor):
                self._check.add(tensor, out)
                self._pending.append(name)
            else:
                self._done[name] = self._writer.write(out, tensor)
        self._check.launch()

    def read(self, name: str, out: Tensor, fill: Fill, part: Part | None = None) -> None:
        """Have `fill` write the bytes of `out`, or only those pieces."""
        if part is not None and out.is_cpu:
            self._done[name] = self._writer.read_part(out, fill, part)
        else:
            self._done[name] = self._writer.read(out, fill)

    def results(self) -> dict[str, CheckResult]:
        """The check of each written tensor, by name."""
        return self._done | dict(zip(self._pending, self._check.results(), strict=True))


def _in_a_row(tensor: Tensor) -> Tensor:
    """All elements as one run of memory, [n]. `reshape(-1)` alone leaves the strides of a vector, and of 0."""
    return tensor.reshape(-1).contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's values are one run of bytes of the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _copy_tensor(out: Tensor, tensor: Tensor, copy: Copy, *, check_finite: bool) -> CheckResult:
    """Copy by `copy`. The digest is the source's: reading it brings each piece into the cache for the copy."""
    memory, to, source, width = tensor_bytes(tensor), out.data_ptr(), tensor.data_ptr(), out.itemsize
    digest, largest = Digest(), 0
    for start in range(0, len(memory), PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        digest.update(piece)
        largest = max(largest, copy(to + start, source + start, len(piece), width))
    is_finite = not (check_finite and out.is_floating_point()) or largest <= largest_bits(out.dtype)
    return CheckResult(digest.hexdigest(), is_finite)


def _place(out: Tensor, start: int, piece: memoryview) -> None:
    """Write the bytes of `piece` to `out`, from its byte `start` on, row-major."""
    width = out.itemsize
    first = start // width
    values = torch.frombuffer(piece, dtype=out.dtype)
    for view, low, high in sections(out, first, first + len(values)):
        view.copy_(values[low - first : high - first].view(view.shape))


def _writer(out: Tensor, tensor: Tensor) -> Callable[[int, int], None]:
    """A function that writes bytes [start, end) of `out`."""
    if out.dtype == tensor.dtype:
        to, source = np.asarray(tensor_bytes(out)), np.asarray(tensor_bytes(tensor))
        return lambda start, end: np.copyto(to[start:end], source[start:end])
    width, flat, values = out.itemsize, out.view(-1), tensor.reshape(-1)

    def cast(start: int, end: int) -> None:
        flat[start // width : end // width].copy_(values[start // width : end // width])

    return cast
