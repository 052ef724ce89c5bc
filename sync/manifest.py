"""The manifest of one weight version: its tensors, their form on the wire, and the digests that prove it arrived.

Digests are those of `sync.digests`, of a tensor in the receiver's dtype. The total digest covers name, dtype, shape and
digest of every tensor, sorted by name: equal totals mean equal weights under equal names. The digests of pieces make up
a tensor's own, so they are covered too.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TypeAlias, TypeVar

import msgspec
import torch
import xxhash
from torch import Tensor

from sync.described_types import describe_types
from sync.digests import DIGEST_FORM, PIECE_BYTES, digest_of, piece_digests
from sync.errors import ManifestMismatch
from sync.tensor_check import TensorCheck, supports

MAX_VERSION = 2**63
MAX_NAMES = 2**18
"""Most names in a manifest, tied ones too."""
MAX_NAME_BYTES = 512
MAX_DIMENSIONS = 8
_MAX_TENSOR_BYTES = 2**50
_DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest."""
Form: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""
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
    pieces: str = ""
    """Digests of the pieces, one after the other, if there is more than one and they are known."""

    @classmethod
    def of_pieces(cls, name: str, shape: tuple[int, ...], dtype: str, digests: Sequence[bytes]) -> "TensorSpec":
        """A spec by the digests of all pieces."""
        pieces = b"".join(digests).hex() if len(digests) > 1 else ""
        return cls(name, shape, dtype, digest_of(digests), pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @property
    def piece_digests(self) -> list[str]:
        """The digest of each piece, in hexadecimal; none if they are not known."""
        return [self.pieces[i : i + _DIGEST_LENGTH] for i in range(0, len(self.pieces), _DIGEST_LENGTH)]

    def check(self) -> None:
        """Raise `ManifestMismatch` unless a tensor of this name, shape and dtype can exist."""
        check_name(self.name)
        if self.dtype not in _DTYPES:
            raise ManifestMismatch(f"'{self.name}': {_unknown_dtype(self.dtype)}")
        check_shape(self.name, self.shape)
        if self.num_bytes > _MAX_TENSOR_BYTES:
            raise _bad_shape(self.name, self.shape)
        if self.pieces and not self._has_its_pieces():
            raise ManifestMismatch(f"'{self.name}': the digests of its pieces do not make up its digest.")

    def _has_its_pieces(self) -> bool:
        if len(self.pieces) != _DIGEST_LENGTH * -(-self.num_bytes // PIECE_BYTES):
            return False
        try:
            return digest_of([bytes.fromhex(self.pieces)]) == self.digest
        except ValueError:
            return False


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

    def is_same(self, other: "WeightManifest") -> bool:
        """Whether both are one version of the same weights under the same names."""
        return (self.version, self.digest, self.aliases) == (other.version, other.digest, other.aliases)

    def check(self) -> None:
        """Raise `ManifestMismatch` unless version, names and shapes are valid, digests are of the form made here, and
        the total digest is that of these tensors."""
        if type(self.version) is not int or not 0 <= self.version < MAX_VERSION:
            raise ManifestMismatch(f"version={self.version!r} is not allowed: must be an int in [0, 2**63).")
        if self.digest_form != DIGEST_FORM:
            what = f"has digests of another form: expected '{DIGEST_FORM}', came '{self.digest_form[:80]}'"
            advice = "Have the same library at both ends; publish a store again."
            raise ManifestMismatch(f"The manifest of version {self.version} {what}. {advice}")
        check_specs(self.tensors, self.aliases, f"The manifest of version {self.version}")
        if total_digest(self.tensors) != self.digest:
            raise ManifestMismatch(
                f"The manifest of version {self.version} is damaged: its total digest is not that of its tensors."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together, in the receiver's dtypes."""
        return sum(spec.num_bytes for spec in self.tensors)


def check_specs(tensors: Sequence[TensorSpec], aliases: Sequence[Sequence[str]], what: str) -> None:
    """Raise `ManifestMismatch`, about `what`, unless it has few enough names, each once, of tensors that can exist, and
    each tied group is a sent tensor and other names."""
    num_names = len(tensors) + sum(map(len, aliases))
    if num_names > MAX_NAMES:
        raise ManifestMismatch(f"{what} has {num_names} names: at most {MAX_NAMES} are allowed. Send fewer at once.")
    for spec in tensors:
        spec.check()
    names = [spec.name for spec in tensors]
    sent = set(names)
    for group in aliases:
        if len(group) < 2 or group[0] not in sent:
            why = "each tied group (alias) is a tensor that is sent and at least one other name of it"
            raise ManifestMismatch(f"{what} ties {first_names(map(repr, group)) or 'no names'}: {why}.")
        for name in group[1:]:
            check_name(name)
        names += group[1:]
    check_distinct(names, what)


def check_distinct(names: Sequence[str], what: str) -> None:
    """Raise `ManifestMismatch`, about `what`, unless each name is there once."""
    if len(set(names)) != len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ManifestMismatch(f"{what} lists {first_names(twice)} more than once.")


def check_name(name: str) -> None:
    """Raise `ManifestMismatch` unless a tensor may have this name."""
    if not 0 < len(name) <= MAX_NAME_BYTES or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        wanted = f"1 to {MAX_NAME_BYTES} bytes of printable UTF-8"
        raise ManifestMismatch(f"{name[:80]!r} is not allowed as the name of a tensor: must be {wanted}.")


def check_shape(name: str, shape: Sequence[int], where: str = "") -> None:
    """Raise `ManifestMismatch`, beginning with `where`, unless a tensor may have as many dimensions of such sizes."""
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= size <= _MAX_TENSOR_BYTES for size in shape):
        raise _bad_shape(name, shape, where)


def _bad_shape(name: str, shape: Sequence[int], where: str = "") -> ManifestMismatch:
    shown = str([size if -_MAX_TENSOR_BYTES <= size <= _MAX_TENSOR_BYTES else "..." for size in shape[:10]])
    limits = f"at most {MAX_DIMENSIONS} dimensions, sizes of 0 or more, and all of it at most 2**50 bytes"
    return ManifestMismatch(f"{where}'{name}' has shape {shown}, which is not allowed: {limits}.")


def check_known(names: Iterable[str], accepted: Mapping[str, object]) -> None:
    """Raise `ManifestMismatch` unless the engine's model has all `names`."""
    if unknown := sorted({name for name in names if name not in accepted}):
        what = f"{counted(unknown, 'name is', 'names are')} not in the model: {first_names(unknown)}"
        known = f", whose names are such as '{next(iter(accepted))}'" if accepted else ""
        raise ManifestMismatch(f"{what}. Send the weights of the model that is loaded{known}.")


def check_forms(forms: Iterable[tuple[str, Form]], accepted: Mapping[str, Form]) -> None:
    """Raise `ManifestMismatch` unless each name of `forms` has the form that is accepted for it."""
    wrong = [f"'{name}': expected {accepted[name]}, came {form}" for name, form in forms if form != accepted[name]]
    if wrong:
        hint = "Shapes must be equal; only floating dtypes are cast."
        raise ManifestMismatch(f"{counted(wrong, 'tensor does', 'tensors do')} not fit: {first_names(wrong)}. {hint}")


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16. Raises `ManifestMismatch` for a dtype that weights do not travel in."""
    if name not in _DTYPES:
        raise ManifestMismatch(_unknown_dtype(name))
    return _DTYPES[name]


def _unknown_dtype(name: str) -> str:
    return f"Weights do not travel as dtype '{name[:80]}'. Known: {', '.join(_DTYPES)}."


def describe(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of `tensor` as it is now, digest included."""
    return describe_all([(name, tensor)])[0]


def describe_all(pairs: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
    """The specs of all tensors as they are now; those on a device are digested there, without their pieces."""
    check, on_device = TensorCheck(check_finite=False), []
    specs: list[TensorSpec] = []
    for name, tensor in pairs:
        form = name, tuple(tensor.shape), dtype_name(tensor.dtype)
        if supports(tensor):
            check.add(tensor)
            on_device.append(len(specs))
            specs.append(TensorSpec(*form, ""))
        else:
            specs.append(TensorSpec.of_pieces(*form, piece_digests(tensor)))
    for i, result in zip(on_device, check.results(), strict=True):
        specs[i] = msgspec.structs.replace(specs[i], digest=result.digest)
    return specs


def decode_json(content: bytes | bytearray, kind: type[_Decoded], what: str, advice: str = "") -> _Decoded:
    """`content` as `kind`. Raises `ManifestMismatch`, which names `what` is wrong, why, and the remedy."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ManifestMismatch(f"{what} ({problem}).{advice}") from None


def total_digest(tensors: Iterable[TensorSpec]) -> str:
    """One digest for a set of tensors, in any order."""
    lines = sorted((s.name, s.dtype, tuple(s.shape), s.digest) for s in tensors)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(lines))


def counted(items: Sized, one: str, many: str) -> str:
    """Format a count with its noun: "1 name is", "3 names are"."""
    return f"{len(items)} {one if len(items) == 1 else many}"


def first_names(names: Iterable[str], limit: int = 10) -> str:
    """The first `limit` of `names` for a message, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


describe_types(WeightManifest)
