"""The manifest of one weight version: what travels, in which form, and the digests that prove it arrived.

Digests are those of `sync.digests`, of a tensor in the receiver's dtype. The total digest covers name, dtype, shape and
digest of every tensor, sorted by name: equal totals mean equal weights under equal names.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import torch
import xxhash
from torch import Tensor

from sync.digests import DIGEST_FORM
from sync.errors import ManifestMismatch
from sync.tensor_check import TensorCheck

MAX_VERSION = 2**63
_MAX_TENSOR_BYTES = 2**50
_Decoded = TypeVar("_Decoded")
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool".split()
}


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype without the prefix: "float32", "bfloat16"."""
    digest: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def check(self) -> None:
        """Raise `ManifestMismatch` unless a tensor of this shape and dtype can exist."""
        torch_dtype(self.dtype)
        if any(size < 0 for size in self.shape) or self.num_bytes > _MAX_TENSOR_BYTES:
            limits = "sizes must be 0 or more, and all of it at most 2**50 bytes"
            raise ManifestMismatch(f"'{self.name}' has shape {self.shape}, which is not allowed: {limits}.")


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tensors of a version. Each tied group travels once, under its first name."""

    version: int
    tensors: list[TensorSpec]
    aliases: list[list[str]] = []
    """Groups of names that are one tensor on the sender's side; the first of each group is in `tensors`."""
    digest: str
    digest_form: str = "xxh3-128"
    """How digests are made (`sync.digests.DIGEST_FORM`). Manifests without this field digest each tensor as a whole."""

    @classmethod
    def of(cls, version: int, tensors: Sequence[TensorSpec], aliases: Sequence[Sequence[str]] = ()) -> "WeightManifest":
        """A manifest with its total digest filled in."""
        groups = [list(group) for group in aliases]
        total = total_digest(tensors)
        return cls(version=version, tensors=list(tensors), aliases=groups, digest=total, digest_form=DIGEST_FORM)

    def check(self) -> None:
        """Raise `ManifestMismatch` unless version, names and shapes are valid, digests are of the form made here, and
        the total digest is that of these tensors."""
        if type(self.version) is not int or not 0 <= self.version < MAX_VERSION:
            raise ManifestMismatch(f"version={self.version!r} is not allowed: must be an int in [0, 2**63).")
        if self.digest_form != DIGEST_FORM:
            what = f"has digests of another form: expected '{DIGEST_FORM}', came '{self.digest_form[:80]}'"
            advice = "Have the same library at both ends; publish a store again."
            raise ManifestMismatch(f"The manifest of version {self.version} {what}. {advice}")
        for spec in self.tensors:
            spec.check()
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ManifestMismatch(f"The manifest of version {self.version} lists {first_names(twice)} more than once.")
        if total_digest(self.tensors) != self.digest:
            raise ManifestMismatch(
                f"The manifest of version {self.version} is damaged: its total digest is not that of its tensors."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together, in the receiver's dtypes."""
        return sum(spec.num_bytes for spec in self.tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16. Raises `ManifestMismatch` for a dtype that weights do not travel in."""
    if name not in _DTYPES:
        raise ManifestMismatch(f"Weights do not travel as dtype '{name}'. Known: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def describe(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of `tensor` as it is now, digest included."""
    return describe_all([(name, tensor)])[0]


def describe_all(pairs: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
    """The specs of all tensors as they are now; those on a device are digested there."""
    check, forms = TensorCheck(check_finite=False), []
    for name, tensor in pairs:
        check.add(tensor)
        forms.append((name, tuple(tensor.shape), dtype_name(tensor.dtype)))
    return [TensorSpec(*form, result.digest) for form, result in zip(forms, check.results(), strict=True)]


def decode_json(content: bytes | bytearray, kind: type[_Decoded], what: str, advice: str = "") -> _Decoded:
    """`content` as `kind`. Raises `ManifestMismatch`, which says `what` is wrong, why, and what to do."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ManifestMismatch(f"{what} ({problem}).{advice}") from None


def total_digest(tensors: Iterable[TensorSpec]) -> str:
    """One digest for a set of tensors, whatever order they come in."""
    lines = sorted((s.name, s.dtype, tuple(s.shape), s.digest) for s in tensors)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(lines))


def first_names(names: Iterable[str], limit: int = 10) -> str:
    """The first `limit` of `names` for a message, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
