"""How the names of a checkpoint's tensors denote the weights of a model, at load and in updates."""

import logging
import re
from collections.abc import Collection, Iterable
from typing import TypeVar

import msgspec

from sync.manifest import check_distinct, counted, first_names

logger = logging.getLogger("sync")

_Value = TypeVar("_Value")
_noted: set[str] = set()
"""Names whose tensors were left out before, so that the log has each once."""


class CheckpointNames(msgspec.Struct, frozen=True):
    """The names beyond a model's own that its checkpoints may have."""

    prefix: str = ""
    """Part of the model's names, such as "model", that a checkpoint of its base model lacks."""
    unused: list[str] = []
    """Regular expressions of names that the model does not use: leftovers of other releases, layers that only draft."""

    def used(self, pairs: Iterable[tuple[str, _Value]], known: Collection[str]) -> list[tuple[str, _Value]]:
        """`pairs` under the names of the model, which are `known`, without those that it does not use.

        Names that are neither stay as they are, to be refused. Raises `ManifestMismatch` for two names of one weight.
        """
        found, left_out = [], []
        pattern = re.compile("|".join(f"({each})" for each in self.unused) or r"(?!)")
        for name, value in pairs:
            whole = f"{self.prefix}.{name}"
            if name not in known and whole in known:
                found.append((whole, value))
            elif name in known or not (pattern.search(name) or pattern.search(whole)):
                found.append((name, value))
            else:
                left_out.append(name)
        if new := [name for name in left_out if name not in _noted]:
            _noted.update(new)
            logger.info(
                "%s of no use to this model and left out: %s",
                counted(new, "tensor is", "tensors are"),
                first_names(new),
            )
        check_distinct([name for name, _ in found], "The source")
        return found
