"""The weights of all ranks, as rank 0 stages, packs and commits them: no rank ever holds a whole weight for long.

tensor that arrives ── 8 MiB at a time ──> window ──> every rank stages its own part; elsewhere they are sent to it
pack: on all ranks, each next to its live copies; if one fails, nothing is live yet
commit: on all ranks, between two steps
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from rollout_engine.execution.part_weights import PartWeights, pieces_of
from rollout_engine.execution.rank_parts import Piece, RankParts
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.weights.held_weights import HeldWeights
from sync.digests import Digest, tensor_bytes
from sync.manifest import TensorSpec
from sync.pieces import Lacking


class TeamWeights(PartWeights):
    """Satisfies `WeightHolder` for the weights of all ranks; made on rank 0.

    Args:
        team: the other ranks.
        own, parts, whole: as of `PartWeights`; rank 0's.
    """

    def __init__(self, team: RankTeam, own: HeldWeights, parts: RankParts, whole: Mapping[str, Tensor]) -> None:
        super().__init__(own, parts, whole, team.exchange.window)
        self._team, self._window_is_shared = team, team.exchange.window_is_shared

    def values(self, name: str) -> Tensor:
        """The whole live values, a copy."""
        out = torch.empty(self.metadata[name][1], dtype=self._dtypes[name])
        flat, start = out.view(-1), 0
        for piece in self._read(name):
            flat[start : start + len(piece)] = piece
            start += len(piece)
        return out

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Specs of live values, which are digested as they pass through the window."""
        return [self._describe_tensor(name) for name in names]

    def _describe_tensor(self, name: str) -> TensorSpec:
        digest, (dtype, shape) = Digest(), self.metadata[name]
        for piece in self._read(name):
            digest.update(tensor_bytes(piece))
        digest.hexdigest()
        return TensorSpec.of_pieces(name, shape, dtype, digest.pieces)

    def _read(self, name: str) -> Iterator[Tensor]:
        """The elements of a live weight in order, in the window until the next ones are asked for."""
        dtype = self._dtypes[name]
        for start, stop in pieces_of(self.metadata[name][1], dtype.itemsize):
            with self._using_window:
                self._read_piece(name, start, stop)
                yield self._window[: (stop - start) * dtype.itemsize].view(dtype)

    def _read_piece(self, name: str, start: int, stop: int) -> None:
        """Have every rank write its part of elements [start, stop) into the window."""
        own = partial(self._parts.read, name, start, stop)
        _, *found = self._team.ask("read_weight", own, name=name, start=start, stop=stop)
        if not self._window_is_shared:
            piece = Piece(self._window, start, stop, self._dtypes[name])
            for regions, content in zip(self._team.regions, found, strict=True):
                piece.write(regions[name], content)

    def is_packed(self, name: str) -> bool:
        return name not in self._own.metadata or self._own.is_packed(name)

    def prepare_weights(self) -> None:
        self._team.ask("prepare_weights", self._own.prepare_weights)

    def start(self, *, inplace: bool, lacking: Lacking | None, carried: Iterable[str] | None) -> None:
        assert lacking is None, "updates of a team bring all they announce"
        names = None if carried is None else list(carried)
        own = None if names is None else self._parts.known(names)
        self._begin(inplace=inplace)
        start = partial(self._own.start, inplace=inplace, lacking=None, carried=own)
        self._team.ask("start_weights", start, inplace=inplace, carried=names)

    def pack(self, *, inplace: bool, lacking: Lacking | None, names: Iterable[str]) -> None:
        every = list(names)
        known = self._parts.known(every)
        self._placed = {}
        pack = partial(self._own.pack, inplace=inplace, lacking=None, names=known)
        self._team.ask("pack_weights", pack, inplace=inplace, names=every)

    def commit(self, *, lacking: Lacking | None) -> None:
        self._team.ask("commit_weights", partial(self._own.commit, lacking=None))

    def settle(self) -> None:
        self._placed = {}
        self._team.ask("settle_weights", self._own.settle)

    @property
    def num_shadow_bytes(self) -> int:
        return self._own.num_shadow_bytes * self._team.num_ranks

    def num_bytes_to_shadow(self) -> int:
        return self._own.num_bytes_to_shadow() * self._team.num_ranks

    def make_room_for_shadow(self) -> bool:
        return self.num_bytes_to_shadow() <= self._own.num_free_bytes

    def _stage_piece(self, name: str, start: int, stop: int) -> None:
        """Have every rank stage its part of elements [start, stop), which are in the window."""
        own = partial(self._parts.stage, name, start, stop, inplace=self._inplace)
        apart = None
        if not self._window_is_shared:
            piece = Piece(self._window, start, stop, self._dtypes[name])
            apart = [{"content": piece.bytes_of(regions[name])} for regions in self._team.regions]
        self._team.ask("stage_weight", own, apart=apart, name=name, start=start, stop=stop, inplace=self._inplace)
