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
    text_prefixes: list[tuple[str, str]] = []
    """Beginnings of a composite's names of its text model, such as "model.language_model.", and the model's own."""
    other_parts: list[str] = []
    """Beginnings of a composite's names of its other parts, such as "model.vision_tower."."""

    def used(self, pairs: Iterable[tuple[str, _Value]], known: Collection[str]) -> list[tuple[str, _Value]]:
        """`pairs` under the names of the model, which are `known`, without those that it does not use.

        Names that are neither stay as they are, to be refused. Raises `ManifestMismatch` for two names of one weight.
        """
        found, unused, others = [], [], []
        pattern = re.compile("|".join(f"({each})" for each in self.unused) or r"(?!)")
        for name, value in pairs:
            candidates = self._candidates(name)
            if (own := next((each for each in candidates if each in known), None)) is not None:
                found.append((own, value))
            elif any(each.startswith(tuple(self.other_parts)) for each in candidates):
                others.append(name)
            elif any(map(pattern.search, candidates)):
                unused.append(name)
            else:
                found.append((name, value))
        _note(unused, "of no use to this model and left out")
        _note(others, "of other parts than the text model (for images, video, audio: not served), and left out")
        check_distinct([name for name, _ in found], "The source")
        return found

    def own(self, name: str, known: Collection[str]) -> str:
        """The model's name of the tensor that a checkpoint calls `name`; any other name as it is."""
        return next((each for each in self._candidates(name) if each in known), name)

    def _candidates(self, name: str) -> list[str]:
        """The names that `name` may stand for, the most literal first."""
        whole = [name, f"{self.prefix}.{name}"]
        replaced = [
            own + each.removeprefix(theirs)
            for each in whole
            for theirs, own in self.text_prefixes
            if each.startswith(theirs)
        ]
        return whole + replaced


def _note(names: list[str], reason: str) -> None:
    """Log, once for each name, that tensors were left out."""
    if new := [name for name in names if name not in _noted]:
        _noted.update(new)
        logger.info("%s %s: %s", counted(new, "tensor is", "tensors are"), reason, first_names(new))
