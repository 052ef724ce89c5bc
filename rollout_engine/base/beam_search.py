"""Settings and results of a beam search."""

import math
from typing import Annotated

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import FinishReason
from rollout_engine.base.sampling_params import MAX_COUNT, MAX_LOGPROBS
from rollout_engine.base.structs import UserStruct


class BeamSearchParams(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """Settings of a beam search. Unknown names, wrong types and broken bounds raise `RequestError`.

    >>> BeamSearchParams(beam_width=4, max_tokens=32)
    """

    error_class = RequestError

    beam_width: Annotated[int, msgspec.Meta(ge=1, le=MAX_LOGPROBS)]
    """Sequences that are followed at once, and returned."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    """Most tokens of a sequence behind its prompt."""
    ignore_eos: bool = False
    """Continue past the checkpoint's end ids."""
    temperature: float = 0.0
    """Divides the logits of which log-probs are made; 0 counts as 1."""
    length_penalty: float = 1.0
    """Power of the number of generated tokens, end token included, that divides a sequence's log-prob to give its
    score: above 0 long ones are preferred to short ones of the same log-prob; in [-10, 10]."""
    include_stop_str_in_output: bool = False
    """Keep the end token in the text."""

    def check(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise RequestError.for_field("temperature", self.temperature, "a finite number >= 0")
        if not -10 <= self.length_penalty <= 10:
            raise RequestError.for_field("length_penalty", self.length_penalty, "in [-10, 10]")


class BeamSearchSequence(msgspec.Struct):
    """One sequence that a search found."""

    tokens: list[int]
    """Prompt and generated tokens, end token included."""
    logprobs: np.ndarray
    """float32 [T], of the generated tokens, at the temperature of the search."""
    cum_logprob: float
    """Their sum, in float64."""
    score: float
    """`cum_logprob` divided by T ** `length_penalty`."""
    finish_reason: FinishReason
    """"stop" at an end id, else "length"."""
    stop_reason: int | None
    """The end id."""
    policy_versions: list[int]
    """Version of the weights that scored each generated token."""
    text: str | None = None
    """Text of prompt and generated tokens; None without a tokenizer."""


class BeamSearchOutput(msgspec.Struct):
    """The sequences found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
