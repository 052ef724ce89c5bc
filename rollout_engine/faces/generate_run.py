"""One call of `generate`: its requests, read until the last has ended. Blocking and asynchronous callers share it."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from rollout_engine.base.errors import GenerateTimeoutError, LifecycleError, RequestError
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.threads import run_in_thread
from rollout_engine.engine.interrupts import deliver, held
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.loop_waker import LoopWaker
from rollout_engine.faces.reader import Reader
from rollout_engine.faces.replica_methods import require_replica
from rollout_engine.telemetry.progress import ProgressBar
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.prompts import check_chat_arguments, with_chat_options, with_lora

_SHOWN_REQUESTS = 4
"""Requests that the error of a deadline names."""


class GenerateRun:
    """The requests of one call, and their outputs. After an error call `close`.

    `timeout_seconds`: how long each request may take from now on; None: as long as it takes. `on_arrival` is called, on
    any thread, when there is something to `read`.
    """

    def __init__(
        self,
        frontend: Frontend,
        verb: str = "generate",
        *,
        timeout_seconds: float | None = None,
        on_arrival: Callable[[], object] = lambda: None,
    ) -> None:
        self.verb = verb
        """The method that was called, for a progress bar and errors."""
        self._timeout_seconds = _checked_seconds(timeout_seconds)
        self._frontend, self._reader = frontend, Reader(frontend, on_arrival)
        self._request_ids: list[str] = []
        self._outputs: dict[str, RequestOutput] = {}
        self._deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._is_closed = False

    def add(self, prompts: Any, params: Any, **options: Any) -> None:
        """Queue the requests; `options` of `Frontend.add_requests`. Raises `RequestError`, nothing queued."""
        self._request_ids = self._reader.add_all(prompts, _final_only(params), **options)
        if self._is_closed:  # meanwhile, by another thread
            self.close()

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._reader)

    @property
    def outputs(self) -> list[RequestOutput]:
        """One output per request, in order, once all have ended."""
        return [self._outputs[request_id] for request_id in self._request_ids]

    @property
    def has_news(self) -> bool:
        """Whether `read` returns at once."""
        return self._reader.has_news

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the deadline, at least 0; None without one."""
        return None if self._timeout_seconds is None else max(self._deadline - time.monotonic(), 0.0)

    @property
    def num_open_tokens(self) -> int:
        """Tokens so far of requests that have not ended."""
        return self._reader.num_tokens()

    def read(self) -> list[RequestOutput]:
        """Take outputs that have arrived, or wait briefly for one. Raises `GenerateTimeoutError` after the deadline."""
        outputs = self._reader.read()
        self._outputs.update((output.request_id, output) for output in outputs)
        self.check_deadline()
        return outputs

    def check_deadline(self) -> None:
        """Raise `GenerateTimeoutError` if requests have not ended at the deadline."""
        if len(self) and time.monotonic() >= self._deadline:
            raise self._late()

    def close(self) -> None:
        """Abort the requests that have not ended; no-op if the engine is gone."""
        self._is_closed = True
        with suppress(LifecycleError), held():
            self._reader.abort(self._request_ids)

    def _late(self) -> GenerateTimeoutError:
        count = self._frontend.streams.num_tokens
        num_tokens = {
            index: count([request_id])
            for index, request_id in enumerate(self._request_ids)
            if request_id not in self._outputs
        }
        shown = [f"prompts[{index}] after {n} tokens" for index, n in list(num_tokens.items())[:_SHOWN_REQUESTS]]
        shown += ["..."] if len(num_tokens) > _SHOWN_REQUESTS else []
        what = f"{len(num_tokens)} of {len(self._request_ids)} requests had not ended after {self._timeout_seconds:g} s"
        return GenerateTimeoutError(
            f"{self.verb}: {what} and were aborted ({', '.join(shown)}). Give more seconds or fewer max_tokens; the "
            "error's `outputs` has what had ended.",
            outputs=[self._outputs.get(request_id) for request_id in self._request_ids],
            num_tokens=num_tokens,
        )


def generate(run: GenerateRun, prompts: Any, params: Any, *, use_tqdm: bool, **options: Any) -> list[RequestOutput]:
    """One finished output per prompt, in order. Whatever is raised ends the requests first."""
    with held():
        try:
            run.add(prompts, params, **options)
            with ProgressBar(len(run), desc=run.verb, unit="prompt", shown=use_tqdm) as bar:
                while len(run):
                    deliver()
                    for output in run.read():
                        bar.update(sum(len(sample.token_ids) for sample in output.outputs))
                    bar.count(lambda: run.num_open_tokens)
            return run.outputs
        except BaseException:
            run.close()
            raise


def generate_all(
    frontend: Frontend,
    method: Callable[..., Any],
    prompts: Any,
    params: Any,
    chat: ChatOptions,
    *,
    lora_request: Any,
    use_tqdm: bool,
    timeout_seconds: float | None = None,
    **options: Any,
) -> list[RequestOutput]:
    """Run `generate` for `method` of a blocking face, after its checks, and with adapters loaded."""
    check_chat_arguments(chat, method)
    run = GenerateRun(frontend, method.__name__, timeout_seconds=timeout_seconds)
    prompts = with_lora(with_chat_options(prompts, chat), lora_request)
    require_replica(frontend, options.get("replica_index"))
    frontend.require_running(run.verb, run.seconds_left)
    frontend.ensure_loras(lora_request)
    return generate(run, prompts, params, use_tqdm=use_tqdm, **options)


async def agenerate(
    frontend: Frontend, prompts: Any, params: Any, *, timeout_seconds: float | None = None, **options: Any
) -> list[RequestOutput]:
    """`generate` in an event loop, which stays free. Cancelling it ends the requests."""
    waker, arrived = LoopWaker.of(asyncio.get_running_loop()), asyncio.Event()
    run = GenerateRun(frontend, timeout_seconds=timeout_seconds, on_arrival=lambda: waker.wake(arrived))
    try:
        await run_in_thread(run.add, prompts, params, **options)
        while len(run):
            arrived.clear()
            if run.has_news:
                run.read()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(run.seconds_left):
                    await arrived.wait()
            run.check_deadline()
        return run.outputs
    except BaseException:
        run.close()
        raise


def _checked_seconds(seconds: Any) -> float | None:
    if seconds is None or type(seconds) in (int, float) and 0 < seconds < math.inf:
        return seconds  # type: ignore[no-any-return]
    raise RequestError.for_field("timeout_seconds", seconds, "a number of seconds above 0, or None: no deadline")


def _final_only(params: Any) -> Any:
    """The same params without intermediate outputs, which would not be read."""
    if isinstance(params, list | tuple):
        return [_final_only(each) for each in params]
    if params is None or isinstance(params, dict):
        return {**(params or {}), "output_kind": "final_only"}
    if not isinstance(params, SamplingParams):
        return params  # it pools, or is refused, with its index, by the input processor
    return msgspec.structs.replace(params, output_kind="final_only")
