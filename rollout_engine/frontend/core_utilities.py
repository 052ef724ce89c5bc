"""The calls a client may make on a core in another process: by registered name, with typed arguments.

Nothing else of the core can be reached: a name that is not registered here does not exist, whatever it is.
"""

import inspect
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import RequestError, unknown_name
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.frontend.input_processor import InputProcessor
from rollout_engine.frontend.scoring import score_pairs
from rollout_engine.frontend.weight_ends import Meeting
from rollout_engine.frontend.weight_intake import WeightIntake
from rollout_engine.frontend.wire import Call, Health, IoStats, WireError, unpack
from rollout_engine.messages import EngineCoreOutputs, UpdateOptions
from rollout_engine.metrics import CoreMetrics
from rollout_engine.outputs import UpdateReport
from sync.manifest import WeightManifest


class Utility(NamedTuple):
    """A method of `CoreUtilities` and the struct its keyword arguments are decoded to."""

    method: Callable[..., Any]
    arguments: type[msgspec.Struct]


UTILITIES: dict[str, Utility] = {}
"""Every name that can be called."""


def utility(method: Callable[..., Any]) -> Callable[..., Any]:
    """Register a method of `CoreUtilities`; its annotations are what a call is checked against."""
    hints = get_type_hints(method)
    fields = [
        (name, hints[name]) if parameter.default is inspect.Parameter.empty else (name, hints[name], parameter.default)
        for name, parameter in inspect.signature(method).parameters.items()
        if name != "self"
    ]
    arguments = msgspec.defstruct(method.__name__, fields, kw_only=True, forbid_unknown_fields=True)
    UTILITIES[method.__name__] = Utility(method, arguments)
    return method


class CoreUtilities:
    """Runs calls between two steps. A method returns its result, or a future where it takes several steps."""

    def __init__(
        self,
        core: EngineCore,
        executor: InlineExecutor,
        io: IoStats,
        weights: WeightIntake,
        deliver: Callable[[EngineCoreOutputs], None],
    ) -> None:
        """`deliver` takes ends that no step brought."""
        self._core, self._executor, self._io, self._weights, self._deliver = core, executor, io, weights, deliver
        self._client_index = -1
        """Whose call runs."""
        self._waiting: list[tuple[Callable[[], bool], Future[None]]] = []
        self._inputs = InputProcessor(
            None, max_model_len=executor.info.max_model_len, vocab_size=executor.info.vocab_size
        )

    def run(self, client_index: int, call: Call) -> Any | Future[Any]:
        """Result of a call. Raises `RequestError` for a name or arguments that are not registered, and its own."""
        if call.name not in UTILITIES:
            raise RequestError(unknown_name("utility", call.name[:80], UTILITIES), field="name", value=call.name)
        method, kind = UTILITIES[call.name]
        self._client_index = client_index
        try:
            arguments = unpack(call.arguments, kind)
        except WireError as problem:
            raise RequestError(f"{call.name}: {problem}.", field="arguments") from None
        return method(self, **{name: getattr(arguments, name) for name in kind.__struct_fields__})

    def after_step(self) -> None:
        """Resolve what waited for this step."""
        if self._waiting:
            self._waiting = [waiter for waiter in self._waiting if not _resolve(*waiter)]

    @utility
    def check_health(self) -> Health:
        """Proof that the busy loop turns, and what it has done."""
        return Health(
            pid=os.getpid(),
            policy_version=self._core.policy_version,
            num_unfinished_requests=self._core.num_unfinished_requests,
            num_steps=self._core.stats.num_steps,
            io=self._io,
        )

    @utility
    def get_core_metrics(self) -> CoreMetrics:
        """Counters and gauges of now."""
        return self._core.metrics()

    @utility
    def get_cache_usage(self) -> float:
        """KV blocks referenced by live requests / all blocks."""
        return self._core.cache_usage()

    @utility
    def get_num_unfinished_requests(self) -> int:
        """Of all clients."""
        return self._core.num_unfinished_requests

    @utility
    def get_model_metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every weight."""
        return self._executor.metadata()

    @utility
    def check_integrity(self) -> None:
        """Recount requests, blocks and references from scratch; AssertionError says what is off."""
        self._core.check_integrity()

    @utility
    def pause_generation(self, mode: str, clear_cache: bool) -> Future[None]:
        """Done when the pause is complete."""
        start = time.perf_counter()
        self._deliver(self._core.pause(mode, clear_cache=clear_cache))
        paused = self._drained()
        paused.add_done_callback(lambda _: self._core.stats.add_pause(time.perf_counter() - start))
        return paused

    @utility
    def require_running(self, verb: str) -> None:
        """Raise, naming `verb`, unless a request added now is computed without another call."""
        self._core.lifecycle.require_running(verb[:80])

    @utility
    def resume_generation(self) -> None:
        """Go on after a pause."""
        self._core.resume()

    @utility
    def is_paused(self) -> bool:
        """Whether a pause is in force."""
        return self._core.lifecycle.paused is not None

    @utility
    def sleep(self, level: int, mode: str) -> Future[None]:
        """Done when the memory is released."""
        self._deliver(self._core.sleep(level, mode))
        return self._drained()

    @utility
    def wake_up(self, tags: list[str] | None) -> None:
        """Take memory back."""
        self._core.wake_up(tags)

    @utility
    def is_sleeping(self) -> bool:
        """Whether some memory is released."""
        return bool(self._core.lifecycle.asleep)

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Forget every known prefix; whether that was done."""
        return self._core.reset_prefix_cache(reset_running_requests=reset_running_requests)

    @utility
    def wait_for_requests_to_drain(self) -> Future[None]:
        """Done when nothing is in flight; `LifecycleError` when what is in flight is frozen."""
        return self._when(self._is_empty)

    @utility
    def get_live_weights(self) -> tuple[int, dict[str, tuple[str, tuple[int, ...]]]]:
        """Their version, and name -> (dtype, shape) of each."""
        return self._core.policy_version, self._executor.metadata()

    @utility
    def begin_weight_update(self, manifest: WeightManifest, meeting: Meeting, options: UpdateOptions) -> Future[bool]:
        """Open an update. True: the manifest is accepted, send. False: these weights are live already."""
        return self._weights.begin(self._client_index, manifest, meeting, options)

    @utility
    def end_weight_update(self) -> Future[UpdateReport]:
        """The report of this client's last update, once it is complete."""
        return self._weights.report(self._client_index)

    @utility
    def abort_weight_update(self) -> None:
        """Give up this client's update, unless it has been committed."""
        self._weights.call_off(self._client_index)

    @utility
    def load_weights(self, path: str, version: int | None, options: UpdateOptions) -> Future[UpdateReport]:
        """One whole update from a published store or a checkpoint that this process can read."""
        return self._weights.load(self._client_index, path, version, options)

    @utility
    def score(
        self, prompt_token_ids: list[list[int]], completion_token_ids: list[list[int]], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of completions under the live weights: per sequence float32 [len(completion)]."""
        self._core.lifecycle.require_weights("score")
        pairs = self._inputs.check_scored(prompt_token_ids, completion_token_ids, temperature)
        return score_pairs(self._executor, pairs, temperature)

    def _drained(self) -> Future[None]:
        return self._when(lambda: not self._core.lifecycle.draining)

    def _is_empty(self) -> bool:
        return not self._core.num_draining("wait_for_requests_to_drain")

    def _when(self, done: Callable[[], bool]) -> Future[None]:
        """Resolved after the first step that finds `done`, or with what it raises."""
        future: Future[None] = Future()
        if not _resolve(done, future):
            self._waiting.append((done, future))
        return future


def _resolve(done: Callable[[], bool], future: Future[None]) -> bool:
    try:
        if not done():
            return False
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    return True
