"""The worker of one engine of a group whose engines divide the experts of a mixture."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import LifecycleError
from rollout_engine.execution.divided_weights import DividedUpdater, DividedWeights, key_of
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.worker import Worker
from rollout_engine.model.backend import Backend
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.shard_files import ShardFiles
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.model.ranks.divided_experts import expert_weights
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.weights.held_weights import HeldWeights
from rollout_engine.weights.lazy_tensors import LazyTensors
from rollout_engine.weights.manifest_checks import ManifestChecks


class DividedWorker(Worker):
    """A `Worker` that holds some of the experts. If the model has none, it is whole, and no engine waits for others."""

    def __init__(self, config: EngineConfig, group: ExpertGroup) -> None:
        self.group = group
        super().__init__(config)

    def _load(self, config: EngineConfig, device: torch.device, seat: Seat | None) -> LoadedModel:
        return load_model(config, device, seat, self.group)

    def _resident_weights(self, loaded: LoadedModel, backend: Backend, device: torch.device) -> ResidentWeights:
        resident = super()._resident_weights(loaded, backend, device)
        self._own = resident.updater
        if loaded.cut is None:
            return resident
        weights = DividedWeights(cast(HeldWeights, self._own.weights), loaded.cut, self.group)
        checks = ManifestChecks(loaded.cut.whole, loaded.aliases, loaded.names)
        resident.updater = DividedUpdater(weights, checks, self.group, config=loaded.module.config)
        return resident

    def begin_rounds(self) -> None:
        """Take part in the rounds of the group from now on, if the model has experts."""
        if self.group.layers:
            self.group.serve(key_of(0, ""))

    def live_weights(self) -> Mapping[str, Tensor]:
        """The own part of every weight."""
        self.updater.live("live_weights")  # raises if values may not be live ones
        return LazyTensors(self._own.live("live_weights"), self._own.values)

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        if self.group.layers:
            raise LifecycleError(self._refusal("apply_model"))
        return super().apply_model(fn)

    def save_sharded_state(self, path: Path, files: ShardFiles) -> None:
        if self.group.layers:
            raise LifecycleError(self._refusal("save_sharded_state"))
        super().save_sharded_state(path, files)

    def score(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise `LifecycleError`: an extension's call is no step, which the engines of a group compute together."""
        raise LifecycleError(self._refusal("score"))

    def _refusal(self, verb: str) -> str:
        what = f"every one of the {self.group.size} engines has only some of the experts"
        return f"{verb}: not possible with data_parallel_size={self.group.size}: {what}."


class LoneWorker(Worker):
    """The worker of a group of one engine, which has all experts, and is compared with those of larger groups."""

    def _load(self, config: EngineConfig, device: torch.device, seat: Seat | None) -> LoadedModel:
        loaded = super()._load(config, device, seat)
        self._experts = expert_weights(loaded.module)
        return loaded

    def shared_digest(self) -> str:
        return self.updater.digest(self._experts)
