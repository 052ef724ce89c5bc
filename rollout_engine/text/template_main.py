"""A process that renders chat templates of requests: ``python -m rollout_engine.text.template_main SOCKET``.

A template is a program: this process is killed when one takes too long or too much memory, and nothing else is. SOCKET
is the descriptor of its end of the connection to `rollout_engine.text.request_templates`.
"""

from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from rollout_engine.base.errors import RequestError
from rollout_engine.children.bounded import answer_orders, bound_memory, bound_seconds
from rollout_engine.text.chat_rendering import ChatRenderer
from rollout_engine.text.template_wire import Rendered, Rendering, unable

SECONDS = 1.0
"""Computing time that one template may take."""
MORE_BYTES = 512 << 20
"""Memory that the process may take beyond its size at the start."""
MAX_CHARS = 32 << 20
"""Longest text of a conversation."""


def main() -> None:
    """Answer until the other end is gone, or no message has arrived for a minute."""
    bound_memory(MORE_BYTES)
    answer_orders(Rendering, _answer)


class _Tokenizer:
    """The parts of a tokenizer that `ChatRenderer` reads."""

    chat_template = None
    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    def __init__(self, special_tokens_map: dict[str, str]) -> None:
        self.special_tokens_map = special_tokens_map

    def get_chat_template(self, chat_template: str, tools: object) -> str:
        return chat_template


def _answer(order: Rendering) -> Rendered:
    bound_seconds(SECONDS)
    try:
        tokenizer: Any = _Tokenizer(order.special_tokens)
        messages, options = (msgspec.json.decode(each) for each in (order.messages, order.options))
        text = ChatRenderer(tokenizer, _ignore).render(messages, chat_template=order.template, **options)
        text.encode()  # a lone surrogate is no text
    except RequestError as problem:
        is_of_message = problem.field.startswith("messages[")
        return Rendered(problem=str(problem)[:1000], field=problem.field if is_of_message else "chat_template")
    except Exception as problem:  # a template is a program: it may raise anything
        return Rendered(problem=unable(f"{type(problem).__name__}: {str(problem)[:1000]}"))
    finally:
        bound_seconds(0.0)
    if len(text) > MAX_CHARS:
        return Rendered(problem=unable(f"the text has {len(text)} characters, and at most {MAX_CHARS} are taken"))
    return Rendered(text)


def _ignore(warning: str) -> None:
    """Log nothing: warnings about a stranger's template are no concern of the server's."""


if __name__ == "__main__":
    main()
