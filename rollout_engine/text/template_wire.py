"""Messages between a front end and its process that renders chat templates of requests."""

import msgspec


class Rendering(msgspec.Struct, frozen=True, tag="rendering"):
    """A conversation to render under a template."""

    template: str
    arguments: bytes
    """JSON of the keyword arguments of `apply_chat_template`, its conversation included."""
    special_tokens: dict[str, str]
    """Texts of the tokenizer's special tokens, by the names that templates know them by."""


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The answer: the text, or the problem."""

    text: str = ""
    problem: str = ""
    """Empty for none."""
