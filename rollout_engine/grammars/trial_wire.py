"""Messages between a front end and its process for grammars on trial."""

import msgspec


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message to the process."""

    tokenizer: str
    """The content of `tokenizer.json`."""
    vocab_size: int
    eos_token_ids: list[int]
    seconds: float
    """Computing time that a trial may take."""


class Trial(msgspec.Struct, frozen=True, tag="trial"):
    """A grammar to compile."""

    text: str
    """`structured_outputs.text_of`."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to either."""

    problem: str
    """The error; empty if there was none."""
