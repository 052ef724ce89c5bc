"""Messages between a front end and its process that renders chat templates of requests."""

import msgspec


class Rendering(msgspec.Struct, frozen=True, tag="rendering"):
    """A conversation to render under a template."""

    template: str
    messages: bytes
    """JSON of messages that `as_messages` returned."""
    options: bytes
    """JSON of their `ChatOptions`, without the template."""
    special_tokens: dict[str, str]
    """Texts of the tokenizer's special tokens, by their names in templates."""


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The answer: the text, or the problem."""

    text: str = ""
    problem: str = ""
    """A sentence; empty for none."""
    field: str = "chat_template"
    """The field of the request that the problem is about."""


def unable(reason: str) -> str:
    """Word the problem of a template that gives no text."""
    return f"The request's chat_template cannot render these messages: {reason}."
