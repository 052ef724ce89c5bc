"""The worker of rank 0, if a model is cut over ranks: it schedules nothing, but draws, and leads the others."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import torch
from torch import Tensor, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import DirtyWeightsError, LifecycleError
from rollout_engine.base.messages import KVSave
from rollout_engine.execution.kv_layout import Transfer
from rollout_engine.execution.rank_parts import RankParts
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.team_transfer import TeamTransfer
from rollout_engine.execution.team_weights import TeamWeights
from rollout_engine.execution.worker import Worker
from rollout_engine.model.backend import Backend
from rollout_engine.model.loading.shard_files import ShardFiles
from rollout_engine.model.loading.sharded_state import write_shard
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.weights.held_weights import HeldWeights
from rollout_engine.weights.lazy_tensors import LazyTensors
from rollout_engine.weights.manifest_checks import ManifestChecks
from rollout_engine.weights.transaction import WeightUpdater
from sync.manifest import TensorSpec


class LeadingWorker(Worker):
    """A `Worker` whose updates, sleeps and steps are those of all ranks."""

    def __init__(self, config: EngineConfig, team: RankTeam) -> None:
        names = [name for name in ("tensor_parallel_size", "pipeline_parallel_size") if getattr(config, name) > 1]
        self._team, self._cut = team, " and ".join(f"{name}={getattr(config, name)}" for name in names)
        super().__init__(config, team.seat)

    def _resident_weights(self, loaded: LoadedModel, backend: Backend, device: torch.device) -> ResidentWeights:
        resident = super()._resident_weights(loaded, backend, device)
        self._own = resident.updater
        held = cast(HeldWeights, self._own.weights)
        parts = RankParts(held, loaded.cut.parts, self._team.exchange.window)
        weights = TeamWeights(self._team, held, parts, loaded.cut.whole)
        checks = ManifestChecks(loaded.cut.whole, loaded.aliases, loaded.names)
        resident.updater = WeightUpdater(weights, checks, weights.writer, config=loaded.module.config)
        return resident

    def _begin_to_serve(self) -> None:
        self._team.wait_started()
        self._team.seat.serve()

    def live_weights(self) -> Mapping[str, Tensor]:
        """The own part of every weight."""
        if self.updater.is_open:
            raise LifecycleError("live_weights: an update is open; commit or abort it first.")
        if self.updater.dirty:
            raise DirtyWeightsError.for_verb("live_weights", forgotten=self.updater.forgotten)
        return LazyTensors(self._own.live("live_weights"), self._own.values)

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> NoReturn:
        raise LifecycleError(_not_with_ranks("watch_layers", self._cut))

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> NoReturn:
        what = _not_with_ranks("apply_model", self._cut)
        raise LifecycleError(f"{what} A function cannot be sent to another process: use a worker extension.")

    def _write_shards(self, directory: Path, files: ShardFiles) -> list[list[TensorSpec]]:
        num_ranks, live = self._team.num_ranks, self.live_weights()
        own = partial(write_shard, directory, 0, num_ranks, self._own.metadata(), live, files)
        found = self._team.ask("write_shard", own, directory=str(directory), **files._asdict())
        return msgspec.convert(found, list[list[TensorSpec]])

    def _open_transfer(self, save: Callable[[bytes, memoryview], None]) -> Transfer:
        self._transfer = TeamTransfer(self._team, self.runner.open_transfer(save), save)
        return self._transfer

    def save_kv(self, saves: list[KVSave]) -> None:
        self._transfer.save(saves)

    def reset_encoder_cache(self) -> None:
        self._team.ask("reset_encoder_cache", super().reset_encoder_cache)

    def release_kv(self) -> None:
        self._team.ask("release_kv", super().release_kv)

    def release_weights(self, *, forget: bool) -> None:
        self._team.ask("release_weights", partial(super().release_weights, forget=forget), forget=forget)

    def restore_weights(self) -> None:
        self._team.ask("restore_weights", super().restore_weights)


def _not_with_ranks(verb: str, cut: str) -> str:
    return f"{verb}: not possible with {cut}: every rank has only a part of the model."
