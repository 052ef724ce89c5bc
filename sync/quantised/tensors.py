"""The float weight of a quantised checkpoint, and the stored tensors that it is computed from."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sync.errors import ManifestMismatch, SyncError
from sync.lazy_tensor import LazyTensor
from sync.stored_tensor import StoredTensor

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of scales, as safetensors spells them."""


class Recipe(NamedTuple):
    """How one weight is computed."""

    shape: tuple[int, ...]
    parts: list[StoredTensor]
    compute: Callable[..., Tensor]
    """Takes the values of the parts, in order; returns float32 of this shape."""


class QuantisedFormat(Protocol):
    """One format, with the settings of one checkpoint."""

    endings: Mapping[str, str]
    """Endings of the names of stored tensors, each with the ending that the name of their weight has instead."""
    unused: str
    """Regular expression of names of tensors that are about activations or the KV cache alone."""

    def describe(self) -> str:
        """The format in a few words, for the log."""

    def recipe(self, parts: "StoredParts") -> Recipe:
        """How the weight of `parts` is computed. Raises `ManifestMismatch`, naming the tensor, if they do not fit."""


class StoredParts:
    """The stored tensors of one weight, by the endings of their names; "" is one under the weight's own name."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.name, self._tensors = name, dict(tensors)
        self._taken = set[str]()

    def __contains__(self, ending: str) -> bool:
        return ending in self._tensors

    @property
    def path(self) -> Path:
        """A file that has one of the tensors."""
        return next(iter(self._tensors.values())).path

    def take(
        self, ending: str, dtypes: Collection[str], shapes: Collection[tuple[int, ...]] = (), num_dims: int = 0
    ) -> StoredTensor:
        """A tensor of one of these dtypes and shapes, or of `num_dims` dimensions; 0 is any number.

        Raises `ManifestMismatch` if there is none, or another.
        """
        tensor = self._tensors.get(ending)
        if tensor is None:
            have = ", ".join(sorted(part.name for part in self._tensors.values()))
            raise self.refusal(f"the tensor '...{ending}' of this weight is missing; there are {have}")
        self._taken.add(ending)
        if tensor.stored_dtype not in dtypes:
            raise self.refusal(
                f"'{tensor.name}' is expected to be {' or '.join(dtypes)}, and is {tensor.stored_dtype}", tensor
            )
        if shapes and tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.refusal(f"'{tensor.name}' is expected to be {wanted}, and is {list(tensor.shape)}", tensor)
        if num_dims and len(tensor.shape) != num_dims:
            raise self.refusal(f"'{tensor.name}' is {list(tensor.shape)}, not of {num_dims} dimensions", tensor)
        return tensor

    def check_all_taken(self) -> None:
        """Raise `ManifestMismatch` if there are tensors that the format does not use."""
        if extra := [tensor for ending, tensor in self._tensors.items() if ending not in self._taken]:
            raise self.refusal(f"'{extra[0].name}' is not a part of a weight of this format", extra[0])

    def refusal(self, why: str, tensor: StoredTensor | None = None) -> ManifestMismatch:
        """An error about this weight."""
        path = self.path if tensor is None else tensor.path
        return ManifestMismatch(f"{path}: the quantised weight '{self.name}' cannot be read: {why}.")


class DequantisedTensor(LazyTensor):
    """The float32 weight that stored tensors denote, computed each time it is asked for."""

    stored_dtype = "quantised"

    def __init__(self, name: str, recipe: Recipe) -> None:
        super().__init__(recipe.shape, torch.float32)
        self.name, self._recipe = name, recipe
        first = recipe.parts[0]
        self.path, self.check = first.path, first.check

    def materialize(self) -> Tensor:
        """Read the stored tensors and compute the weight.

        Raises `ChecksumMismatch` if the files have changed, or a value is not finite: no quantiser stores such a scale
        or code. `ManifestMismatch` for values that the format does not have, such as a group that does not exist.
        """
        values = [part.materialize() for part in self._recipe.parts]
        try:
            found = self._recipe.compute(*values)
        except RuntimeError as problem:  # torch's own word for memory that it cannot have
            raise SyncError(f"{self.path}: '{self.name}' could not be dequantised: {problem}") from None
        assert found.dtype == torch.float32 and tuple(found.shape) == self.shape, "as in the recipe"
        if not found.isfinite().all():
            what = f"{self.path}: the weight '{self.name}' is not finite: a stored scale or code is damaged"
            raise ManifestMismatch(f"{what}. Save or download it again.")
        return found
