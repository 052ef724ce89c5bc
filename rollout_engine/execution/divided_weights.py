"""The weights of an engine that holds some of the experts: every update brings all, and each engine keeps its own.

tensor of one engine's own     its place, as ever
expert of several engines      8 MiB at a time ──> window ──> the own part is staged; all of it is digested
commit                         the experts are used by no engine from before it until all engines have the same weights
"""

import hashlib
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from rollout_engine.base.errors import LifecycleError
from rollout_engine.execution.part_weights import PartWeights
from rollout_engine.execution.rank_parts import RankParts
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.exchange import WINDOW_BYTES
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.weights.held_weights import HeldWeights
from rollout_engine.weights.manifest_checks import ManifestChecks
from rollout_engine.weights.transaction import WeightUpdater
from sync.manifest import TensorSpec
from sync.pieces import Lacking


def key_of(version: int, digest: str) -> int:
    """A number that stands for weights in the group: of a version, with a digest of all of them."""
    found = hashlib.blake2b(f"{version} {digest}".encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1


class DividedWeights(PartWeights):
    """Satisfies `WeightHolder`.

    Args:
        own: the weights in this process.
        cut: the parts that it has of every weight.
        group: closed when weights are overwritten in place.
    """

    def __init__(self, own: HeldWeights, cut: ModelCut, group: ExpertGroup) -> None:
        window = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
        super().__init__(own, RankParts(own, cut.parts, window), cut.whole, window)
        self._group = group
        self.divided = {name for name, part in cut.parts.items() if part.view.numel() < cut.whole[name].numel()}
        """Names of which this engine has a part, or nothing."""
        self.known: dict[str, TensorSpec] = {}
        """Specs of live tensors that are divided, as the last whole update has named them."""

    def values(self, name: str) -> Tensor:
        """The live values. Raises `LifecycleError` for a weight of which this engine has only a part."""
        if name in self.divided:
            what = f"'{name}' is divided over {self._group.size} engines (data_parallel_size)"
            raise LifecycleError(f"{what}: no engine has all of it.")
        return self._own.values(name)

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Specs of live values; those of a divided weight are known behind a whole update that named it so."""
        found = []
        for name in names:
            if name in self.divided:
                dtype, shape = self.metadata[name]
                found.append(self.known.get(name) or TensorSpec(name, shape, dtype, ""))
            else:
                found += self._own.describe([name])
        return found

    def is_packed(self, name: str) -> bool:
        return name in self.divided or self._own.is_packed(name)

    def prepare_weights(self) -> None:
        self._own.prepare_weights()

    def start(self, *, inplace: bool, lacking: Lacking | None, carried: Iterable[str] | None) -> None:
        assert lacking is None, "updates of divided weights bring all they announce"
        if inplace:
            self._group.close()
        self._begin(inplace=inplace)
        own = None if carried is None else self._parts.known(list(carried))
        self._own.start(inplace=inplace, lacking=None, carried=own)

    def place(self, name: str, *, inplace: bool) -> Tensor:
        if name not in self.divided:
            return self._own.place(name, inplace=inplace)
        return super().place(name, inplace=inplace)

    def pack(self, *, inplace: bool, lacking: Lacking | None, names: Iterable[str]) -> None:
        self._placed = {}
        self._own.pack(inplace=inplace, lacking=None, names=self._parts.known(list(names)))

    def commit(self, *, lacking: Lacking | None) -> None:
        self._own.commit(lacking=None)

    def settle(self) -> None:
        self._placed = {}
        self._own.settle()

    @property
    def num_shadow_bytes(self) -> int:
        return self._own.num_shadow_bytes

    def num_bytes_to_shadow(self) -> int:
        return self._own.num_bytes_to_shadow()

    def make_room_for_shadow(self) -> bool:
        return self._own.make_room_for_shadow()

    def _stage_piece(self, name: str, start: int, stop: int) -> None:
        self._parts.stage(name, start, stop, inplace=self._inplace)


class DividedUpdater(WeightUpdater):
    """The transaction on the weights of an engine of a group, which are used only with those of equal engines."""

    weights: DividedWeights

    def __init__(self, weights: DividedWeights, checks: ManifestChecks, group: ExpertGroup, **options: Any) -> None:
        super().__init__(weights, checks, weights.writer, **options)
        self._group = group
        self._key = key_of(0, "")

    def digest(self, without: Container[str] = ()) -> str:
        """Total digest of the live weights that are not divided: equal in engines that have the same weights."""
        return super().digest(self.weights.divided)

    def commit(self, version: int | None = None) -> None:
        """Do as `WeightUpdater.commit`, while no engine of the group uses this one's experts.

        They are used again once all engines have these weights. After a failure half-way they are not, before the
        next complete update.
        """
        update = self._require_open("commit")
        manifest, was_closed = update.manifest, self._group.is_closed
        self._group.close()
        try:
            super().commit(version)
        finally:
            if not self.dirty:
                is_whole = not update.options.partial
                if self._open is None:
                    before = "" if is_whole else f"{self._key} "
                    self._key = key_of(manifest.version, before + manifest.digest)
                    divided = self.weights.divided
                    self.weights.known = {n: s for n, s in update.specs.items() if is_whole and n in divided}
                if self._open is None or not was_closed:
                    self._group.open(self._key)
