"""An executor whose model is cut over ranks: rank 0 in this process, each other one in a process under it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from rollout_engine.base.class_names import function_name
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RPCError
from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.group_executor import GroupExecutor, GroupSettings
from rollout_engine.execution.leading_worker import LeadingWorker
from rollout_engine.execution.pipe_launcher import PipeLauncher
from rollout_engine.execution.rank_launcher import LocalLauncher, RankLauncher
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_values import pack_value
from rollout_engine.execution.rank_wire import Joined
from rollout_engine.execution.ray_ranks import RayLauncher
from rollout_engine.execution.step_feed import StepFeed
from rollout_engine.execution.steps_ahead import StepsAhead
from rollout_engine.execution.team_adapters import TeamAdapters
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.adapters.pool import Adapters
from rollout_engine.model.backends import Device, device_of, exchange_of
from rollout_engine.model.ranks.pipe_memory import PipePlan
from worker_ext.score import ScoreExtension
from worker_ext.weights import WeightSyncExtension

_OF_ALL = (ScoreExtension, WeightSyncExtension)
"""Extensions whose methods rank 0 carries out for all ranks, which take part in them."""


def make_executor(config: EngineConfig, group: GroupSettings | None = None) -> InlineExecutor:
    """Load the model that `config` names, in this process, or over ranks. Raises `ConfigError` if it cannot be.

    `group`: the engine's place among `data_parallel_size`, which a fleet gives.
    """
    if group is not None:
        return GroupExecutor.from_settings(config, group)
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size}: one engine alone has no others to divide experts with. "
            "Start the group as a whole: LLM, LLMEngine, AsyncLLM, RolloutService and `rollout-engine serve` do."
        )
    if config.num_ranks == 1:
        return InlineExecutor.from_config(config)
    return ProcessExecutor.from_config(config)


class ProcessExecutor(InlineExecutor):
    """Runs the workers of all ranks. Once a rank has ended, steps and calls raise `EngineDeadError`, which names it."""

    def __init__(self, worker: LeadingWorker, team: RankTeam, **options: Any) -> None:
        super().__init__(worker, **options)
        self._steps = StepsAhead()
        """Steps that other stages have begun, and rank 0 has not."""
        self._team, own = team, worker.backend.adapters
        self._adapters = None if own is None else TeamAdapters(team, own)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "ProcessExecutor":
        """Load the model, each rank its part. Raises `ConfigError` if it cannot be served, or not on these ranks."""
        return cls._load(config, partial(_load_ranks, config))

    def watch(self, on_death: Callable[[str], object]) -> None:
        """Call `on_death`, on another thread, with the reason when a rank ends or fails."""
        self._team.watch(on_death)

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        if self._team.feed is not None:
            return self._submit_ahead(self._team.feed, work)
        if not self.worker.backend.runs_ahead:
            return super().submit(work)
        wait = super().submit(work)

        def result() -> ModelRunnerOutput:
            with _name_broken_rank(self._team):
                out = wait()
            self._team.require_alive()  # a device that lost the others computes on, with data that never arrived
            return out

        return result

    def _submit_ahead(self, feed: StepFeed, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Have the stages before rank 0's begin a step; rank 0 computes its part when the result is asked for."""
        if self.dirty and work.scheduled:
            return partial(self._refuse, work)
        self._team.require_alive()
        with _name_broken_rank(self._team):
            serial = feed.announce(work)

        def run() -> ModelRunnerOutput:
            feed.begin(serial)
            return self._execute(work)

        return self._steps.submit(run)

    def _wait_until_idle(self) -> None:
        self._steps.finish()
        super()._wait_until_idle()

    def score(self, *args: Any, **options: Any) -> Iterator[dict[int, TokenScores]]:
        with _name_broken_rank(self._team):
            yield from super().score(*args, **options)

    def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, caller: int | None = None
    ) -> list[Any]:
        """Results of an extension's method, one per rank, in order. Raises as `Extensions.call`, the first error.

        A method that rank 0 runs for all ranks, such as a weight update, has one result, the same for each.
        """
        owner = self.worker.extensions.owner_of(method)
        if owner is None or owner in _OF_ALL:
            return super().collective_rpc(method, args, kwargs, caller=caller) * self._team.num_ranks
        if not self.runs_beside_steps(method):
            self._wait_until_idle()
        try:
            arguments = pack_value((list(args), dict(kwargs)))
        except TypeError as problem:
            raise RPCError(f"{method}: its arguments cannot travel to other ranks: {problem}.", method=method) from None
        own = partial(self.worker.extensions.call, method, args, kwargs)
        return self._team.ask("call_extension", own, name=method, arguments=arguments)

    def call_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Raise `RPCError`: the other ranks are other processes."""
        name = function_name(function)
        what = f"collective_rpc: {name}: a function cannot be sent to other ranks"
        raise RPCError(f"{what}: call a method of a worker extension by its name.", method=name)

    def require_adapters(self, verb: str) -> Adapters:
        super().require_adapters(verb)
        assert self._adapters is not None, "rank 0 has some"
        return self._adapters

    def reset_mm_cache(self) -> None:
        """Forget the pictures that crossed to the other ranks, on both ends."""
        self._wait_until_idle()
        self._team.forget_pictures()

    def shutdown(self) -> None:
        """Drop the model and the KV pool, and end the other ranks."""
        super().shutdown()
        self._team.shutdown()

    def _execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        with _name_broken_rank(self._team):
            if work.kv_saves:  # before the other ranks begin the step, which they could not leave to answer
                self.worker.save_kv(work.kv_saves)
                work = msgspec.structs.replace(work, kv_saves=[])
            return super()._execute(work)


def _load_ranks(config: EngineConfig) -> tuple[LeadingWorker, RankTeam]:
    """The worker of rank 0, once every rank has loaded its part, and its team."""
    device = device_of(config)
    launcher = _launcher_of(config, device)
    try:
        exchange = exchange_of(device, launcher.meeting, launcher.rendezvous)
    except BaseException:
        launcher.close()
        raise
    own, splits_sums = Joined.of(device.torch_device), device.splits_sums(config)
    team = RankTeam(config, launcher, exchange, own, runs_ahead=not device.is_host, splits_sums=splits_sums)
    try:
        with _name_broken_rank(team):
            return LeadingWorker(config, team), team
    except BaseException:
        team.shutdown()
        raise


def _launcher_of(config: EngineConfig, device: Device) -> RankLauncher:
    if config.pipeline_parallel_size > 1:
        return PipeLauncher(PipePlan(config.pipeline_parallel_size, config.tensor_parallel_size))
    if config.executor == "ray":
        return RayLauncher(config, config.num_threads or torch.get_num_threads())
    has_group = not device.is_host
    return LocalLauncher(config.tensor_parallel_size, has_group=has_group, device=device.torch_device)


@contextmanager
def _name_broken_rank(team: RankTeam) -> Iterator[None]:
    """Raise, for broken turns inside, the error that names the rank that has broken them."""
    try:
        yield
    except BrokenTurnsError as effect:
        team.raise_error(effect)
