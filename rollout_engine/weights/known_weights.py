"""Digests of the live weights by tensor and piece, so that an update need send only the differences."""

from collections.abc import Callable, Iterable, Mapping

from sync.manifest import TensorSpec
from sync.pieces import Lacking, Part, changed_part, num_bytes_lacking

_LEAST_UNCHANGED = 0.5
"""Share of the bytes that must be live already before the others alone are taken: the less there is to leave, the less
it saves, and a piece that is sent alone is copied over live weights while steps wait."""


class KnownWeights:
    """Specs of live tensors, all finite, by the names under which they arrived. It may have fewer than there are."""

    def __init__(self) -> None:
        self._specs: dict[str, TensorSpec] = {}

    def replace(self, specs: Iterable[TensorSpec]) -> None:
        """Record that exactly these tensors are live."""
        self._specs = {spec.name: spec for spec in specs}

    def lacking(self, specs: Mapping[str, TensorSpec], takes_pieces: Callable[[str], bool]) -> Lacking | None:
        """Return the pieces that an update to `specs` has to bring; None: all, because that is most of it.

        Pieces of a tensor are distinguished if `takes_pieces(name)`.
        """
        lacking: dict[str, Part | None] = {}
        for name, spec in specs.items():
            part = changed_part(self._specs.get(name), spec)
            if part is None or part.indices:
                lacking[name] = part if part is not None and takes_pieces(name) else None
        total = sum(spec.num_bytes for spec in specs.values())
        return lacking if num_bytes_lacking(lacking, specs) <= (1 - _LEAST_UNCHANGED) * total else None
