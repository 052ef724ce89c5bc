"""Requests of one HTTP call, read on the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.threads import run_in_thread
from rollout_engine.faces.loop_waker import LoopWaker
from rollout_engine.results.open_streams import Stream
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.prompt_bounds import check_hidden_states, check_prompt_logprobs, check_text_size
from rollout_engine.serve.request_templates import with_rendered_text
from rollout_engine.serve.route import LONG_BYTES, MANY_BYTES, Asked
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served
from rollout_engine.text.input_processor import CheckedPrompt, Params
from rollout_engine.text.pooled_prompt import closed_conversation
from rollout_engine.text.prompts import with_lora

Check: TypeAlias = Callable[[Sequence[CheckedPrompt]], None]
"""Raises for prompts, as token ids, that are not to be queued together."""


class Generation:
    """Prompts of one call, all queued or none. Closing it aborts the unfinished ones.

    Use it as a context manager, and ask for the `next` output until there is none.
    """

    __slots__ = ("_asked", "_called", "_loop", "_name", "_open", "_ready", "_served", "_waiter", "_waker")

    def __init__(self, served: Served, asked: Asked, name: str | Sequence[str] | None = None) -> None:
        """`name`: the client's name for the request, or each prompt's, by which it may abort it.

        None: its X-Request-Id.
        """
        self._served, self._asked, self._name = served, asked, name or asked.request_id
        self._loop = asyncio.get_running_loop()
        self._waker = LoopWaker.of(self._loop)
        self._ready: list[Stream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._open: dict[Stream, int] = {}
        """Requests that have not ended, and the index of the prompt of each."""
        self._called: list[tuple[str, str]] = []
        """The client's name of each request, and its id."""

    async def start(
        self,
        prompts: Sequence[Any],
        settings: Settings | Sequence[Settings],
        *,
        priority: int = 0,
        session_id: str | None = None,
        lora: str | None = None,
        repeats: bool = False,
    ) -> None:
        """Queue the prompts, with settings for all or one each; `lora`: the adapter that they run under.

        `repeats`: whether every choice of a prompt is answered with the prompt's log-probs, of which an answer may have
        a limited number in all. Raises `RequestError`, nothing queued, and `HttpProblem` 503 while paused.
        """
        each = [settings] * len(prompts) if isinstance(settings, Settings) else settings
        params, seeds = [one.params for one in each], [one.seed for one in each]
        checks: list[Check] = []
        info = self._served.engine.frontend.client.info
        has_several = len(params) > 1 or (repeats and params[0].n > 1)
        if has_several and any(one.prompt_logprobs is not None for one in params):
            checks.append(partial(check_prompt_logprobs, vocab_size=info.vocab_size, repeats=repeats))
        if info.pooling is not None and any(one.return_hidden_states is not None for one in params):
            checks.append(partial(check_hidden_states, hidden_size=info.pooling.hidden_size))
        await self._queue(with_lora(list(prompts), lora), params, seeds, priority, session_id, _all_of(checks))

    async def pool(
        self,
        prompts: Sequence[Any],
        params: PoolingParams,
        *,
        priority: int = 0,
        session_id: str | None = None,
        lora: str | None = None,
    ) -> None:
        """Queue prompts that are pooled, as `start` does others."""
        closed = [closed_conversation(each) if isinstance(each, dict) else each for each in prompts]
        await self._queue(with_lora(closed, lora), [params] * len(closed), [None] * len(closed), priority, session_id)

    async def _queue(
        self,
        prompts: Sequence[Any],
        params: Sequence[Params],
        seeds: Sequence[int | None],
        priority: int,
        session_id: str | None,
        check: Check | None = None,
    ) -> None:
        self._served.check_open()
        session = session_id or self._asked.session_id
        options = {"priority": priority, "session_id": session, "trace_headers": self._asked.trace_headers}
        inputs = self._served.engine.frontend.inputs
        prompts = [await with_rendered_text(self._served, each) for each in prompts]
        for prompt in prompts:
            check_text_size(self._served, prompt)
        for each in params:
            if inputs.has_new_rules(each):
                await run_in_thread(inputs.try_rules, each)
        is_slow = self._asked.has_pictures or self._asked.num_bytes > MANY_BYTES or _are_long(prompts, self._asked)
        add = partial(self._add, prompts, params, seeds, options, check)
        streams = await self._add_on_thread(add) if is_slow else add()
        for index, stream in enumerate(streams):
            name = self._name if isinstance(self._name, str) else self._name[index]
            self._open[stream] = index
            self._called.append((name, stream.request_id))
            self._served.begin(name, stream.request_id)

    async def _add_on_thread(self, add: Callable[[], list[Stream]]) -> list[Stream]:
        """Queue requests on a thread. Those that are queued after the client has left are aborted."""
        work = asyncio.ensure_future(run_in_thread(add))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(self._close_late)
            raise

    def _close_late(self, work: "asyncio.Future[list[Stream]]") -> None:
        for stream in () if work.cancelled() or work.exception() is not None else work.result():
            self._served.engine.frontend.close(stream)

    def _add(
        self,
        prompts: Sequence[Any],
        params: Sequence[Params],
        seeds: Sequence[int | None],
        options: dict[str, Any],
        check: Check | None,
    ) -> list[Stream]:
        frontend = self._served.engine.frontend
        if len(prompts) == 1 and check is None:
            return [frontend.add_request(prompts[0], params[0], None, self._wake, seed=seeds[0], **options)]
        given = prompts[0] if len(prompts) == 1 else list(prompts)  # a lone prompt's errors have no index
        return frontend.add_requests(given, params, self._wake, seeds=seeds, check_all=check, **options)

    async def next(self) -> tuple[int, RequestOutput] | None:
        """The next output, with the index of its prompt; None once all have ended.

        Raises the error that ended a request, and `HttpProblem` 500 for a sample that failed.
        """
        while self._open:
            while self._ready:
                stream = self._ready.pop(0)
                index = self._open.get(stream)
                output = None if index is None else self._served.engine.frontend.take(stream)
                if index is not None and output is not None:
                    if output.finished:
                        del self._open[stream]
                    _check_samples(output)
                    return index, output
            self._waiter = self._loop.create_future()
            if not self._ready:  # looked at again: `_wake` has no effect before there is a waiter
                await self._waiter
            self._waiter = None
        return None

    async def results(self) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts."""
        found: dict[int, RequestOutput] = {}
        while (told := await self.next()) is not None:
            if told[1].finished:
                found[told[0]] = told[1]
        return [found[index] for index in range(len(found))]

    def set(self) -> None:
        """Continue reading: the loop's waker calls this when streams have become ready."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Abort unfinished requests."""
        for name, request_id in self._called:
            self._served.end(name, request_id)
        for stream in self._open:
            self._served.engine.frontend.close(stream)
        self._open.clear()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self, stream: Stream) -> None:
        self._ready.append(stream)
        if self._waiter is not None:
            self._waker.wake(self)


def _check_samples(output: RequestOutput) -> None:
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise HttpProblem(500, f"A sample failed: {sample.error}")


def _all_of(checks: Sequence[Check]) -> Check | None:
    """One check for all of them; None if there are none."""

    def check(prompts: Sequence[CheckedPrompt]) -> None:
        for each in checks:
            each(prompts)

    return check if checks else None


def _are_long(prompts: Sequence[Any], asked: Asked) -> bool:
    """Whether encoding the prompts of a call takes so long that other requests should not wait for it."""
    texts = [each.get("prompt", "") if isinstance(each, dict) else each for each in prompts]
    if sum(len(text) for text in texts if isinstance(text, str)) > LONG_BYTES:
        return True
    return asked.is_long and any(isinstance(each, dict) and "messages" in each for each in prompts)
