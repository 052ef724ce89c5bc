"""An executor that runs its worker in the caller's own process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from torch import nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import DirtyWeightsError, LifecycleError
from rollout_engine.base.messages import KVSave, ModelRunnerOutput, SchedulerOutput
from rollout_engine.base.pictures import EncodedPictures, Picture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.execution.kv_link import KVLink, make_kv_connector
from rollout_engine.execution.model_info import ModelInfo
from rollout_engine.execution.profiler import Profiler
from rollout_engine.execution.step_thread import StepThread
from rollout_engine.execution.worker import Worker
from rollout_engine.model.adapters.pool import Adapters
from rollout_engine.model.loading.shard_files import ShardFiles
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.weights.transaction import WeightUpdater
from rollout_engine.weights.update_session import Core


class InlineExecutor:
    """Runs one worker by plain calls. Satisfies `core.executor.Executor`.

    With `async_scheduling` steps run on a thread of their own; all other calls wait until it is idle.
    """

    group: ExpertGroup | None = None
    """The group whose engines compute every step together, because they divide the experts; None: there is none."""

    def __init__(self, worker: Worker, *, async_scheduling: bool = False, profiler: Profiler | None = None) -> None:
        self._worker: Worker | None = worker
        self.profiler = profiler or Profiler()
        self._thread = StepThread() if async_scheduling else None
        self.kv_link: KVLink | None = None
        """The KV connector; None: there is none."""

    worker_class = Worker
    """The kind of worker that `from_config` makes."""

    @classmethod
    def from_config(cls, config: EngineConfig) -> "InlineExecutor":
        """Load the model that `config` names. Raises `ConfigError` when it cannot be served."""
        return cls._load(config, lambda: (cls.worker_class(config),))

    @classmethod
    def _load(cls, config: EngineConfig, load: Callable[[], tuple[Any, ...]]) -> Self:
        """The executor of a worker, which `load` returns first, with the KV connector that `config` names."""
        connector = make_kv_connector(config)
        try:
            worker, *others = load()
        except BaseException:
            if connector is not None:
                connector.close()
            raise
        executor = cls(
            worker,
            *others,
            async_scheduling=config.schedules_ahead and not worker.backend.runs_ahead,
            profiler=Profiler(config.profiler_dir),
        )
        if connector is not None:
            try:
                executor.kv_link = worker.open_link(connector)
            except BaseException:
                executor.shutdown()
                raise
        return executor

    def watch(self, on_death: Callable[[str], object]) -> None:
        """Call `on_death` when another process that the model needs ends: there is none."""

    def leave_group(self) -> None:
        """Leave the group in order, before this process ends: there is none."""

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise LifecycleError("The engine was shut down meanwhile; make a new one.")
        return self._worker

    @property
    def info(self) -> ModelInfo:
        return self.worker.info

    @property
    def updater(self) -> WeightUpdater:
        return self.worker.updater

    def updater_for(self, *, draft: bool) -> WeightUpdater:
        """The transaction on the policy's weights, or the draft model's. Raises `LifecycleError` if none drafts."""
        if not draft:
            return self.updater
        if self.worker.draft is None:
            what = "update_weights(draft=True): this engine has no draft model"
            raise LifecycleError(f"{what}. Start it with speculation=SpeculationConfig(draft_model=...).")
        return self.worker.draft.updater

    @property
    def dirty(self) -> bool:
        """Whether the weights must not be used."""
        return self.updater.dirty

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Submit a step; returns a function that waits for its result. Without a thread that function runs the step.

        While `dirty`, a step fails that computes something; one that only releases finished sequences does not.
        """
        if self.worker.backend.runs_ahead:
            if self.dirty and work.scheduled:
                return partial(self._refuse, work)
            with self.profiler.mark(work):
                result: Callable[[], ModelRunnerOutput] = self.worker.runner.submit(work)
                return result
        run = partial(self._execute, work)
        return run if self._thread is None else self._thread.submit(run)

    def draft(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step of the draft model, at once. Raises `DirtyWeightsError` while it has no weights to use."""
        assert self.worker.draft is not None, "only a draft model drafts"
        return self.worker.draft.execute(work)

    def score(
        self, sequences: list[list[int]], num_prompt: list[int], temperature: float, **options: Any
    ) -> Iterator[dict[int, TokenScores]]:
        """Yield, a piece at a time, the scores of some sequences by their index, as `Backend.score` does."""
        self._wait_until_idle()
        for found in self.worker.backend.score(sequences, num_prompt, temperature, **options):
            yield found
            self._wait_until_idle()

    def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, caller: int | None = None
    ) -> list[Any]:
        """Results of an extension's method, one per rank. Raises as `Extensions.call`.

        `caller`: the client that calls; a weight update that it begins is rolled back when it leaves (`caller_left`).
        """
        if not self.runs_beside_steps(method):
            self._wait_until_idle()
        with self.worker.update.called_by(caller):
            return [self.worker.extensions.call(method, args, kwargs)]

    def call_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Results of `function(worker, *args, **kwargs)`, one per rank. Raises as `Extensions.call_function`."""
        self._wait_until_idle()
        return [self.worker.extensions.call_function(function, args, kwargs)]

    def caller_left(self, caller: int) -> None:
        """Roll back the weight update that `caller` has begun. Blocks while a call is at work on it."""
        self.worker.update.caller_left(caller)

    def runs_beside_steps(self, method: str) -> bool:
        """Whether calls of this method of an extension run on a thread of their own, not between two steps."""
        return self.worker.extensions.runs_beside_steps(method)

    def attach_core(self, core: Core, boundary: Callable[[], AbstractContextManager[object]]) -> None:
        """Report updates that arrive as calls to `core`, inside `boundary()`, which keeps steps out."""
        self.worker.update.attach_core(core, boundary)

    def require_adapters(self, verb: str) -> Adapters:
        """The model's adapters. Raises `LifecycleError`, naming `verb`, if it computes none."""
        if (adapters := self.worker.backend.adapters) is None:
            what = f"{verb}: this engine computes no adapters: deterministic is off on a CPU, or layers run as modules"
            raise LifecycleError(f"{what} on a device (its log says why). Merge the adapter (merge_and_unload).")
        return adapters

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """Results of `fn(module)`, one per rank. Raises as `Worker.apply_model`."""
        self._wait_until_idle()
        return [self.worker.apply_model(fn)]

    def save_sharded_state(self, path: str, pattern: str | None, max_size: int | None) -> None:
        """Write the live weights to a directory, between two steps. Raises as `Worker.save_sharded_state`.

        `pattern`, `max_size`: as of `ShardFiles.of`, which raises `RequestError`.
        """
        files = ShardFiles.of(pattern, max_size, "save_sharded_state")
        self._wait_until_idle()
        self.worker.save_sharded_state(Path(path), files)

    def start_profile(self, directory: str | None, num_steps: int | None, **options: bool) -> None:
        """Begin a profile between two steps. Raises as `Profiler.start`."""
        self._wait_until_idle()
        self.profiler.start(directory, num_steps, **options)

    def stop_profile(self) -> list[str]:
        """End the profile between two steps: the paths of its traces, one per rank. Raises as `Profiler.stop`."""
        self._wait_until_idle()
        return [self.profiler.stop()]

    def prepare_grammar(self, params: SamplingParams) -> Callable[[float], bool] | None:
        """Begin to compile a request's grammar, concurrently with steps. Returns a wait for it, or None if unneeded."""
        if params.structured_outputs is None:
            return None
        grammar = self.worker.grammars.grammar(params.structured_outputs)
        return None if grammar.is_ready(0.0) else grammar.is_ready

    def reset_mm_cache(self) -> None:
        """Forget the pictures that crossed to other processes of the model: there are none."""

    def encode_pictures(self, pictures: Sequence[Picture]) -> EncodedPictures:
        """The features of pictures, between two steps, as `Backend.encode_pictures` gives them."""
        self._wait_until_idle()
        found: EncodedPictures = self.worker.backend.encode_pictures(pictures, self.updater.values)
        return found

    def reset_encoder_cache(self) -> None:
        """Forget the vision tower's outputs, between two steps."""
        self._wait_until_idle()
        self.worker.reset_encoder_cache()

    def save_kv(self, saves: list[KVSave]) -> None:
        self._wait_until_idle()
        self.worker.save_kv(saves)

    @property
    def live_digest(self) -> str | None:
        """Digest of the live weights, by which KV is found; None while it is not known, or they must not be used."""
        if self._worker is None or self.updater.dirty:
            return None
        return self.updater.live_digest.value

    def release_kv(self) -> None:
        self.worker.release_kv()

    def release_weights(self, *, forget: bool) -> None:
        self.worker.release_weights(forget=forget)

    def restore_weights(self) -> None:
        self.worker.restore_weights()

    @property
    def threads(self) -> tuple[int, ...]:
        """Ids of threads, other than the caller's, that run steps."""
        return () if self._thread is None else self._thread.ids

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the live weights, as plain values."""
        return self.updater.num_live_bytes

    @property
    def num_sequences(self) -> int:
        """Number of sequences whose state the runner holds."""
        return int(self.worker.runner.num_sequences)

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every weight."""
        return self.updater.metadata()

    def shutdown(self) -> None:
        """Drop the model and the KV pool."""
        if self._thread is not None:
            self._thread.close()
        self.profiler.close()
        if self.kv_link is not None:
            self.kv_link.close()
        if self._worker is not None:
            self._worker.extensions.close()
            self._worker.update.close()
            self._worker.grammars.close()
        self._worker = None

    def _execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        if self.dirty and work.scheduled:
            self._refuse(work)
        with self.profiler.mark(work):
            output: ModelRunnerOutput = self.worker.runner.execute(work)
            return output

    def _refuse(self, work: SchedulerOutput) -> NoReturn:
        raise DirtyWeightsError.for_verb(f"step {work.step}", forgotten=self.updater.forgotten)

    def _wait_until_idle(self) -> None:
        if self._thread is not None:
            self._thread.wait_until_idle()
