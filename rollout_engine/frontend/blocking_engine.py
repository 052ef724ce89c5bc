"""An engine whose core is another process, for plain threads: what `RolloutPolicy` asks of an engine in process."""

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.errors import DrainTimeoutError, LifecycleError
from rollout_engine.frontend.open_streams import Stream
from rollout_engine.frontend.remote_engine import RemoteEngine
from rollout_engine.frontend.rpc_wire import ask
from rollout_engine.frontend.weight_verbs import WeightVerbs
from rollout_engine.frontend.worker_calls import checked_call, timed_out
from rollout_engine.messages import UpdateOptions
from rollout_engine.metrics import EngineMetrics, RequestStats
from rollout_engine.outputs import RequestOutput, UpdateReport
from rollout_engine.sampling_params import SamplingParams
from sync.base import WeightSource

_POLL_SECONDS = 0.05


class BlockingEngine(WeightVerbs):
    """The verbs of `LLMEngine` that do not step, each a call to the core that blocks until it answers."""

    def __init__(self, remote: RemoteEngine) -> None:
        self._remote = remote
        self.lifecycle_control = RemoteControl(remote)
        """Pause, sleep and what belongs to them."""
        self.worker_calls = RemoteCalls(remote)
        """Methods of worker extensions."""

    @property
    def policy_version(self) -> int:
        """Version of the live weights, as last heard."""
        return self._remote.streams.policy_version

    def require_running(self, verb: str) -> None:
        """Raise, naming `verb`, unless a request added now is computed without another call."""
        self._remote.call("require_running", verb=verb).result()

    @property
    def request_stats(self) -> RequestStats:
        """Timings of this client's requests, as they are filled in."""
        return self._remote.streams.stats

    def get_metrics(self) -> EngineMetrics:
        """Counters and gauges of the core, timings of this client's requests."""
        return self._remote.get_metrics()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        return self._remote.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling settings that the checkpoint's generation_config.json recommends."""
        return self._remote.inputs.default_params()

    def score(
        self,
        prompt_token_ids: Sequence[list[int]],
        completion_token_ids: Sequence[list[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """As `LLMEngine.score`."""
        return self._remote.score(prompt_token_ids, completion_token_ids, temperature).result()

    def apply_update(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """See `update_weights`."""
        return self._remote.update_weights(source, version, options)

    def shutdown(self) -> None:
        """End the core, or leave it if it is another engine's."""
        self._remote.shutdown()


class RemoteControl:
    """What carries out the verbs of `LifecycleVerbs`, in the core's process."""

    def __init__(self, remote: RemoteEngine) -> None:
        self._remote = remote

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See `LifecycleVerbs.pause_generation`."""
        with self._remote.spans.during("pause", mode=mode):
            self._remote.call("pause_generation", mode=mode, clear_cache=clear_cache).result()

    def resume(self) -> None:
        """See `LifecycleVerbs.resume_generation`."""
        self._remote.call("resume_generation").result()

    def is_paused(self) -> bool:
        """See `LifecycleVerbs.is_paused`."""
        return self._remote.call("is_paused", bool).result()

    def sleep(self, level: int, mode: PauseMode) -> None:
        """See `LifecycleVerbs.sleep`."""
        self._remote.call("sleep", level=level, mode=mode).result()

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """See `LifecycleVerbs.wake_up`."""
        named = [tags] if isinstance(tags, str) else None if tags is None else list(tags)
        self._remote.call("wake_up", tags=named).result()

    def is_sleeping(self) -> bool:
        """See `LifecycleVerbs.is_sleeping`."""
        return self._remote.call("is_sleeping", bool).result()

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """See `LifecycleVerbs.reset_prefix_cache`."""
        return self._remote.call("reset_prefix_cache", bool, reset_running_requests=reset_running_requests).result()

    def wait_for_drain(self, timeout: float) -> None:
        """See `LifecycleVerbs.wait_for_requests_to_drain`."""
        drained = self._remote.call("wait_for_requests_to_drain")
        try:
            drained.result(timeout)
        except TimeoutError:
            what = f"requests are still in flight after {timeout:g} seconds"
            raise DrainTimeoutError(f"wait_for_requests_to_drain: {what}; they go on.") from None
        except CancelledError:
            raise LifecycleError("wait_for_requests_to_drain: the call was cancelled.") from None


class RemoteCalls:
    """What carries out the verbs of `WorkerVerbs`, in the core's process."""

    def __init__(self, remote: RemoteEngine) -> None:
        self._remote = remote

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        """See `AsyncLLM.collective_rpc`."""
        call = checked_call(method, timeout, args, kwargs)
        with self._remote.spans.during("collective_rpc", method=method):
            result = ask(self._remote.client, *call, timeout)
            done, _ = wait([result], timeout)
            if not done:
                result.cancel()
                raise timed_out(method, timeout or 0.0, begun=None)
            return result.result()

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """Not possible: `LifecycleError`."""
        advice = "call a method of a worker extension by collective_rpc, or use an engine in this process"
        raise LifecycleError(f"apply_model: functions do not cross processes; {advice}.")


class Inbox:
    """Finished results of one rollout, which alone takes them out; made by it, and gone with it."""

    def __init__(self) -> None:
        self.results: list[RequestOutput] = []
        self.arrived: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        """Requests in another process with something to take."""


class SharedStreams:
    """Requests of several rollouts on one engine, every result to the rollout that asked for it."""

    def __init__(self, remote: RemoteEngine) -> None:
        self._remote = remote
        self._streams: dict[str, Stream] = {}

    def add(self, prompts: list[Any], params: list[SamplingParams], inbox: Inbox) -> list[str]:
        """Queue requests whose finished results go to `inbox`; all of them, or none and a `RequestError`."""
        streams = self._remote.add_requests(prompts, params, inbox.arrived.put)
        self._streams.update((stream.request_id, stream) for stream in streams)
        return [stream.request_id for stream in streams]

    def step_for(self, inbox: Inbox) -> None:
        """Wait a moment for results of `inbox`'s requests. Raises what ended one of them."""
        try:
            stream = inbox.arrived.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        output = self._remote.take(stream)
        if output is not None and output.finished:
            del self._streams[stream.request_id]
            inbox.results.append(output)

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """Tokens that these requests have so far; 0 for those whose finished output is there."""
        return sum(self._streams[id].request.num_tokens for id in request_ids if id in self._streams)

    def abort(self, request_ids: list[str]) -> None:
        """End requests without a result."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                self._remote.close(stream)
