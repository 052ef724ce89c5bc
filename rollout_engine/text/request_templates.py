"""Chat templates in requests of strangers: rendered in a process of their own, in bounded time and memory.

A template is a program. Jinja's sandbox keeps it from files and from Python, but bounds neither its time nor its
memory: nested loops of 78 characters compute for hours, and `{{ "a" * 6000000000 }}` takes 6 GB.
"""

import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.children.bounded import NO_ANSWER, OneProcess
from rollout_engine.text.template_main import SECONDS
from rollout_engine.text.template_wire import Rendered, Rendering, unable

PATIENCE = 30.0
"""Seconds until the process is given up, whatever it computes: it may have to start on a busy machine."""
_MODULE = "rollout_engine.text.template_main"


class RequestTemplates:
    """Renders templates of requests, one at a time, in one process, which starts with the first.

    It ends with this object, or after a minute without work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = OneProcess(_MODULE, "renders chat templates", "chat_template")
        self.close = self._process.close
        """End the process."""

    def render(
        self, template: str, messages: Sequence[Any], options: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> str:
        """The text of a conversation. Blocks; raises `RequestError` for a template that fails, or takes too much.

        `messages`: as `as_messages` returns them. `options`: `ChatOptions` without the template, plain data.
        `special_tokens`: the tokenizer's `special_tokens_map`.
        """
        try:
            in_json = msgspec.json.encode(messages), msgspec.json.encode(options)
            order = Rendering(template, *in_json, special_tokens=dict(special_tokens))
        except (TypeError, ValueError, OverflowError) as problem:
            raise RequestError.for_field("messages", "a conversation", f"plain JSON ({problem})") from None
        with self._lock:
            answer = self._ask(order)
        if answer.problem:
            raise RequestError(answer.problem, field=answer.field)
        return answer.text

    def _ask(self, order: Rendering) -> Rendered:
        for is_last in (False, True):
            process, _ = self._process.get()
            try:
                answer: Rendered = process.ask(order, Rendered, PATIENCE)
                return answer
            except NO_ANSWER:
                status = self._process.end(process)
                if status == -signal.SIGPROF:
                    return Rendered(problem=unable(f"it takes more than {SECONDS:g} s to compute"))
                if status != 0:
                    return Rendered(problem=unable(f"it takes too much memory or time (status {status})"))
                if is_last:
                    what = "The process that renders chat templates ended: send the request again."
                    raise RetryableError(what) from None
        raise AssertionError("two processes were asked")
