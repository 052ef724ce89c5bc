"""What one request asks of the sampler, checked once at the door."""

import math
from typing import Annotated, Literal

import msgspec

from rollout_engine._structs import UserStruct
from rollout_engine.errors import RequestError

MAX_N = 4_096
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 1_024

LogprobsMode = Literal["tempered", "raw", "processed"]
OutputKind = Literal["cumulative", "delta", "final_only"]


class SamplingParams(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one request. Unknown names, wrong types and broken bounds raise `RequestError`.

    >>> SamplingParams(temperature=0.7, max_tokens=64, n=8)
    """

    error_class = RequestError

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    """Samples of one prompt. The prompt is computed once."""
    temperature: float = 1.0
    """Logits are divided by it. 0 is greedy (ties: lowest id). Greedy log-probs count as temperature 1."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches `top_p`; in (0, 1]."""
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Keep the k most likely tokens (ties: lowest ids); 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least `min_p` times as likely as the most likely one; in [0, 1]."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Most tokens to sample; None: up to the engine's `max_model_len`."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Stop ids cannot be sampled, and stop strings do not count, before this many tokens."""
    stop: list[str] | None = None
    """Strings that end the completion; cut from the text unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the completion, besides the checkpoint's own end ids."""
    ignore_eos: bool = False
    """Go on past the checkpoint's end ids."""
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Sequence seed, below 2**64; sample 0 uses it, sample i a mix of it and i. None: derived from the engine's."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """None: none. 0: of the sampled tokens. k: also the k most likely tokens' at each position."""
    logprobs_mode: LogprobsMode = "tempered"
    """"tempered": log_softmax(logits / temperature), what trainers recompute. "raw": at temperature 1.
    "processed": of the distribution actually sampled from, after top-k, top-p and min-p."""
    detokenize: bool = True
    """False: token ids only; `text` stays empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (they stay in the ids)."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the completion in its text."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Keep only the last so many prompt tokens."""
    output_kind: OutputKind = "cumulative"
    """What streamed outputs carry: all so far, only the new part, or nothing before the end."""

    def check(self) -> None:
        _require(
            "temperature",
            self.temperature,
            math.isfinite(self.temperature) and self.temperature >= 0,
            "a finite number >= 0",
        )
        _require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]")
        _require("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        _require("seed", self.seed, self.seed is None or self.seed < 2**64, "below 2**64")
        self._check_stops()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError.for_field("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")

    def _check_stops(self) -> None:
        stop, ids = self.stop or [], self.stop_token_ids or []
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError.for_field("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        for text in stop:
            _require(
                "stop",
                text,
                0 < len(text) <= MAX_STOP_STRING_CHARS,
                f"strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError.for_field("stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token in ids:
            _require("stop_token_ids", token, 0 <= token < 2**31, "token ids >= 0")
        if stop and not self.detokenize:
            raise RequestError.for_field("stop", stop, "absent when detokenize=False", "Stop strings need text.")

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be cut from the distribution (then results carry `kept_logprob_mass`)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _require(field: str, value: object, ok: bool, bound: str) -> None:
    if not ok:
        raise RequestError.for_field(field, value, bound)
