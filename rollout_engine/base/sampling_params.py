"""Sampling settings of one request."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import regex

from rollout_engine.base.errors import RequestError
from rollout_engine.base.peer_options import SAMPLING_PEERS
from rollout_engine.base.seeds import MAX_SEED, MIN_SEED
from rollout_engine.base.structs import UserStruct
from rollout_engine.base.structured_outputs import check_structured_outputs

MAX_N = 4_096
MAX_COUNT = 2**31 - 1
MAX_LOGPROBS = 64
MAX_PROMPT_LOGPROBS = 1_024
MAX_LOGPROB_VALUES = 1 << 26
"""Most log-probs of one request by `logprobs=-1` and `logprob_token_ids`: 256 MiB of them."""
MAX_PROMPT_LOGPROB_VALUES = 1 << 24
"""Most log-probs of one prompt by `prompt_logprobs`: two arrays of 64 MiB."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_REGEX = 16
MAX_STOP_REGEX_CHARS = 1_024
STOP_REGEX_WINDOW = 1_024
"""Longest match of a stop pattern that is found, in characters."""
STOP_REGEX_SECONDS = 0.5
"""Seconds that the patterns of one sample may take to compute, plus a millisecond for each token."""
MAX_STOP_TOKEN_IDS = 1_024
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARS = 1_024
MAX_EXTRA_ARGS_BYTES = 65_536
MAX_TAG_CHARS = 64
_MAX_EXTRA_ARGS_DEPTH = 16

TOKEN_ID_PARAMETERS = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": 1 << 20,  # more than any vocabulary has
    "logit_bias": 1_024,
    "logprob_token_ids": 1_024,
}
"""Parameters that name token ids -> most of them. Ids are in the vocabulary."""
TRUNCATION_RULES = ("top_k", "top_p", "min_p")
"""Parameters that cut tokens from the distribution, in the order in which they apply. Their defaults cut nothing.
Samplers take each as a column, `kernels.row_stats.Truncation`."""
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
"""Parameters that change the logits of earlier tokens, in the order in which they apply. Their defaults change
nothing."""
truncation_of: Callable[["SamplingParams"], tuple[float, ...]] = attrgetter(*TRUNCATION_RULES)
penalties_of: Callable[["SamplingParams"], tuple[float, ...]] = attrgetter(*PENALTIES)

LogprobsMode = Literal["tempered", "raw", "processed"]
OutputKind = Literal["cumulative", "delta", "final_only"]
VersionWait = Literal["wait", "refuse", "end"]
KvHint = Literal["keep", "drop", "prefetch"]
TruncationSide = Literal["left", "right"]


class SamplingParams(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """Sampling settings of one request. Unknown names, wrong types and broken bounds raise `RequestError`.

    >>> SamplingParams(temperature=0.7, max_tokens=64, n=8)
    """

    error_class = RequestError
    peers = SAMPLING_PEERS
    readings = {
        "stop": lambda value: [value] if isinstance(value, str) else value,
        "stop_regex": lambda value: [value] if isinstance(value, str) else value,
        "bad_words": lambda value: [value] if isinstance(value, str) else value,
        "stop_token_ids": lambda value: [value] if type(value) is int else value,
        "logprob_token_ids": lambda value: [value] if type(value) is int else value,
        "top_k": lambda value: 0 if type(value) is int and value == -1 else value,
        "thinking_budget": lambda value: None if type(value) is int and value == -1 else value,
        "logprobs_mode": lambda value: value.removesuffix("_logprobs") if isinstance(value, str) else value,
        "return_hidden_states": lambda value: ("all" if value else None) if isinstance(value, bool) else value,
    }

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    """Samples of one prompt. The prompt is computed once."""
    temperature: float = 1.0
    """Divides the logits. 0 is greedy (ties: lowest id). Greedy log-probs count as temperature 1."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches `top_p`; in (0, 1]."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    """Keep the k most likely tokens (ties: lowest ids); 0 (or -1) keeps all."""
    min_p: float = 0.0
    """Keep tokens at least `min_p` times as likely as the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or output, and multiplies negative ones; in [0.01, 100]."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output contains; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output contains, once for each time; in [-2, 2]."""
    logit_bias: dict[int, float] | None = None
    """Token id -> what is added to its logit, in [-100, 100]; after the penalties."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be sampled, end ids included; None: all."""
    bad_words: list[str] | None = None
    """Words the output must not contain, as a text of their own or after a space: the token that would complete one
    cannot be sampled. Words that tokens spell in another way than the tokenizer does are not noticed."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    """Most tokens to sample; None: up to the engine's `max_model_len`."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    """Stop ids cannot be sampled, and stop strings do not count, before this many tokens."""
    stop: list[str] | None = None
    """Strings (or one string) that end the completion; cut from the text unless `include_stop_str_in_output`."""
    stop_regex: list[str] | None = None
    """Regular expressions (or one), of the `regex` package's syntax, that end the completion: after each token its text
    is searched, and cut where the first match begins (`include_stop_str_in_output`: where it ends). `stop_reason` is
    the pattern; a stop string at the same token goes first. Matches of up to 1,024 characters are found. Streamed text
    waits where it may yet become a match; with word boundaries, lookbehinds or (?m), the last 1,024 characters do. A
    sample whose patterns take more than 0.5 s of computing, and a millisecond for each token, ends with an error."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the completion, besides the checkpoint's own end ids. The token stays in the ids, and its text
    is cut unless `include_stop_str_in_output`."""
    ignore_eos: bool = False
    """Go on past the checkpoint's end ids."""
    seed: int | None = None
    """Sequence seed of 64 bits; sample 0 uses it, sample i a mix of it and i. None: derived from the engine's. A
    negative one is the same seed read as a signed number, as a batch's "seed" column holds it: -1 is 2**64 - 1."""
    logprobs: Annotated[int, msgspec.Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
    """None: none. 0: of the sampled tokens. k: also the k most likely tokens' at each position, and the rank of the
    sampled one. -1: the same of every token of the vocabulary, for at most 2**26 log-probs a request."""
    logprob_token_ids: list[int] | None = None
    """Token ids whose log-probs are returned at every position, in this order; needs no `logprobs`."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=MAX_PROMPT_LOGPROBS)] | None = None
    """None, 0, k up to 1,024 and -1 as in `logprobs`, of the prompt's tokens, the first excepted, with their ranks; k
    or the whole vocabulary for at most 2**24 log-probs a prompt. The prompt is then computed without prefix hits."""
    return_routed_experts: bool = False
    """For a mixture of experts: return which experts its routers chose for every token, of the prompt as well
    (`CompletionOutput.routed_experts`). Prefix hits are those of requests that ask for it, too. On a CPU."""
    return_support: bool = False
    """Return the token ids that truncation (top-k, top-p, min-p) and masks (allowed ids, bad words, grammars, logits
    processors, stop ids held back before `min_tokens`) had left to each draw: `CompletionOutput.support`. Log-probs of
    mode "processed" are renormalised over them. Greedy tokens are not truncated. For at most 2**28 ids a request, on
    a CPU."""
    logprobs_mode: LogprobsMode = "tempered"
    """"tempered": log_softmax(logits / temperature) of the model's own logits, what trainers recompute. "raw": the same
    at temperature 1. "processed": of the distribution actually sampled from, after penalties, bias, logits processors,
    masks, temperature, top-k, top-p and min-p. Prompt tokens were not sampled: theirs are "raw" or else "tempered"."""
    detokenize: bool = True
    """False: token ids only; `text` stays empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (they stay in the ids)."""
    spaces_between_special_tokens: bool = True
    """False, with `skip_special_tokens=False`: no space between two added tokens in a row, where the tokenizer's
    decoder puts one."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token that ended the completion in its text."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)] | None = None
    """Keep only this number of prompt tokens, the last ones or by `truncation_side` the first. -1: as many as leave
    room for `max_tokens` (for one, if that is None) within the engine's `max_model_len`."""
    truncation_side: TruncationSide = "left"
    """The end of the prompt at which `truncate_prompt_tokens` cuts: "left" keeps its last tokens, "right" its first."""
    extra_args: dict[str, Any] | None = None
    """Arguments for the engine's logits processors: numbers, strings, None, lists and dicts of them."""
    output_kind: OutputKind = "cumulative"
    """What streamed outputs carry: all so far, only the new part, or nothing before the end."""
    speculation: bool = True
    """Whether tokens may be drafted for this request, where the engine does so (`EngineConfig.speculation`). Results
    are the same to the bit either way."""
    structured_outputs: dict[str, Any] | None = None
    """The form of the output, to the end token: {"json": schema}, {"regex": pattern}, {"grammar": Lark text},
    {"choice": [text, ...]} or {"structural_tag": {...}}, which binds the output inside of tags alone. Tokens that would
    break it cannot be sampled; an end id or one of `stop_token_ids` can where it is complete, and only there. An output
    that `max_tokens` or a stop string cuts off is as far as it came. Needs the package llguidance."""
    entropy: bool = False
    """Return the entropy at each sampled token (`CompletionOutput.entropies`): of the tempered distribution, whatever
    `logprobs_mode`, penalties and truncation are, as `exact.token_entropy` computes it."""
    return_hidden_states: Literal["sampled", "all"] | None = None
    """Return hidden states of the last layer, behind the final norm, at most 128 MiB of them. "sampled": those from
    which the tokens were drawn (`CompletionOutput.hidden_states`); "all": also those of the prompt's tokens
    (`RequestOutput.prompt_hidden_states`), which is then computed without prefix hits; True is "all". On a CPU."""
    thinking_budget: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] | None = None
    """Most tokens to sample inside thinking, in all its parts of one sample together; None (or -1): any number. Then
    `thinking_end` is forced, token by token, whatever masks forbid: `CompletionOutput.forced` marks these tokens, whose
    log-probs are the policy's like any others, and rollouts leave them out of the assistant mask. Thinking is open
    behind a sampled `thinking_start`, and from the first token on if that is the last tag in the prompt. Of
    `structured_outputs` it goes with "structural_tag" alone."""
    thinking_start: str = "<think>"
    """The text that opens thinking. If it is a token that the tokenizer was given in addition to its vocabulary, that
    token alone; any other text is recognised by its bytes, however tokens spell it."""
    thinking_end: str = "</think>"
    """The text that closes thinking, recognised likewise, and forced as the tokenizer spells it."""
    policy_version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """Sample under the weights of this policy version alone; None: under the live ones. A request for a later version
    waits, while others are computed; one for an earlier version is refused. A weight update ends its samples with the
    tokens they have: `finish_reason` is "abort", and `error` names the versions."""
    min_policy_version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """Begin once this policy version or a later one is live; updates in flight are as for any request. Not together
    with `policy_version`."""
    version_wait: VersionWait = "wait"
    """How a request outside of its version is treated. "wait": it waits for a later one. "refuse": it raises
    `RetryableError` (HTTP 503) instead. "end": for a later or an earlier version, it ends at once, as at an update."""

    kv_hint: KvHint | None = None
    """A hint about the KV of this request. "keep": it will be wanted again, so that its blocks are the
    last to be given up. "drop": it will not, so that blocks which it alone has are forgotten when its samples end, also
    by a KV connector. "prefetch": bring the prompt's KV near, as far as the connector holds it, and sample nothing:
    the request ends with no token and finish_reason "length". No result depends on it (docs/kv.md)."""

    def check(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number >= 0")
        _require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]")
        _require("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        _require("seed", self.seed, self.seed is None or MIN_SEED <= self.seed <= MAX_SEED, "in [-2**63, 2**64)")
        _require(
            "repetition_penalty", self.repetition_penalty, 0.01 <= self.repetition_penalty <= 100, "in [0.01, 100]"
        )
        for field in ("presence_penalty", "frequency_penalty"):
            _require(field, getattr(self, field), -2 <= getattr(self, field) <= 2, "in [-2, 2]")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require("min_tokens", self.min_tokens, fits, f"at most max_tokens={self.max_tokens}")
        _require("truncate_prompt_tokens", self.truncate_prompt_tokens, self.truncate_prompt_tokens != 0, "-1 or >= 1")
        self._check_stops()
        self._check_masks()
        for field, most in TOKEN_ID_PARAMETERS.items():
            _check_ids(field, getattr(self, field), most)
        _check_extra_args(self.extra_args)
        check_structured_outputs(self.structured_outputs)
        if self.structured_outputs is not None and not self.stop_token_ids:
            bound = "False with structured_outputs, whose outputs end with an end id, unless stop_token_ids has some"
            _require("ignore_eos", self.ignore_eos, not self.ignore_eos, bound)
        self._check_thinking()
        least, is_one = self.min_policy_version, self.policy_version is None or self.min_policy_version is None
        _require("min_policy_version", least, is_one, "absent with policy_version", "Give one of them.")

    def _check_thinking(self) -> None:
        for field in ("thinking_start", "thinking_end"):
            text = getattr(self, field)
            _require(field, text, 0 < len(text) <= MAX_TAG_CHARS, f"a text of 1 to {MAX_TAG_CHARS} characters")
        differ = self.thinking_end != self.thinking_start
        _require("thinking_end", self.thinking_end, differ, "other than thinking_start")
        if self.thinking_budget is not None and self.structured_outputs is not None:
            bound, hint = "None with structured_outputs", "A form binds the output from its first token on."
            _require("thinking_budget", self.thinking_budget, "structural_tag" in self.structured_outputs, bound, hint)

    def _check_stops(self) -> None:
        _check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        _check_texts("stop_regex", self.stop_regex, MAX_STOP_REGEX, MAX_STOP_REGEX_CHARS)
        for place, pattern in enumerate(self.stop_regex or ()):
            _check_pattern(f"stop_regex[{place}]", pattern)
        for field in ("stop", "stop_regex"):
            value, bound = getattr(self, field), "absent when detokenize=False"
            _require(field, value, self.detokenize or not value, bound, "Stop strings need text.")

    def _check_masks(self) -> None:
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        _require("allowed_token_ids", self.allowed_token_ids, self.allowed_token_ids != [], "at least one id, or None")
        for token, bias in (self.logit_bias or {}).items():
            _require(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "in [-100, 100]")

    @property
    def num_top_logprobs(self) -> int:
        """Most likely tokens to report at each position; 0 if `logprobs=-1`, which asks for all by their ids."""
        return max(self.logprobs or 0, 0)

    @property
    def wants_ranks(self) -> bool:
        """Whether results carry the rank of the sampled token."""
        return bool(self.logprobs)

    @property
    def asks_for_ids(self) -> bool:
        """Whether results carry log-probs of given token ids, or of all."""
        return self.logprobs == -1 or bool(self.logprob_token_ids)

    def check_num_logprobs(self, num_prompt_tokens: int, max_tokens: int, vocab_size: int) -> None:
        """Raise `RequestError` if a request asks for more log-probs than can be held."""
        if self.prompt_logprobs:
            self._check_num_prompt_logprobs(self.prompt_logprobs, num_prompt_tokens, vocab_size)
        if not self.asks_for_ids:
            return
        width = vocab_size if self.logprobs == -1 else len(self.logprob_token_ids or ())
        field, value = ("logprobs", -1) if self.logprobs == -1 else ("logprob_token_ids", f"{width} ids")
        count, room = self.n * max_tokens * width, MAX_LOGPROB_VALUES // max(1, self.n * width)
        what = f"n={self.n} x {max_tokens} tokens x {width} ids = {count} log-probs"
        hint = f"{what}. " + (f"Give max_tokens={room} or less." if room else "Give a smaller n.")
        _require(field, value, count <= MAX_LOGPROB_VALUES, f"at most {MAX_LOGPROB_VALUES} log-probs a request", hint)

    @staticmethod
    def _check_num_prompt_logprobs(asked: int, num_prompt_tokens: int, vocab_size: int) -> None:
        _require("prompt_logprobs", asked, asked <= vocab_size, f"at most {vocab_size}, the vocabulary")
        width, of = (vocab_size, " of the vocabulary") if asked == -1 else (asked, "")
        count, room = num_prompt_tokens * width, MAX_PROMPT_LOGPROB_VALUES // num_prompt_tokens
        hint = f"{num_prompt_tokens} prompt tokens x {width}{of} = {count} log-probs. Give a shorter prompt"
        hint += f", or prompt_logprobs={min(room, MAX_PROMPT_LOGPROBS)} or less." if room else "."
        bound = f"at most {MAX_PROMPT_LOGPROB_VALUES} log-probs a prompt"
        _require("prompt_logprobs", asked, count <= MAX_PROMPT_LOGPROB_VALUES, bound, hint)

    @property
    def stops_on_text(self) -> bool:
        """Whether a completion may end by its text."""
        return bool(self.stop or self.stop_regex)

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be cut from the distribution (then results carry `kept_logprob_mass`)."""
        return self.temperature > 0 and truncation_of(self) != NO_TRUNCATION

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the earlier tokens."""
        return penalties_of(self) != _NO_PENALTIES


SamplingLike: TypeAlias = SamplingParams | dict[str, Any]
"""Sampling params as users may give them: a dict has their fields."""


def as_sampling_params(value: Any) -> SamplingParams:
    """Convert to `SamplingParams`: themselves, a dict of their fields, or None. Raises `RequestError`."""
    if value is None or isinstance(value, dict):
        return SamplingParams(**{str(name): each for name, each in (value or {}).items()})
    if not isinstance(value, SamplingParams):
        raise RequestError.for_field("sampling_params", value, "SamplingParams, a dict of their fields, or None")
    return value


def _require(field: str, value: object, ok: bool, bound: str, hint: str = "") -> None:
    if not ok:
        raise RequestError.for_field(field, value, bound, hint)


def _check_texts(field: str, texts: list[str] | None, max_count: int, max_chars: int) -> None:
    _check_count(field, texts, max_count, "strings")
    for text in texts or ():
        _require(field, text, 0 < len(text) <= max_chars, f"strings of 1 to {max_chars} characters")


def _check_pattern(field: str, pattern: str) -> None:
    try:
        matches_nothing = regex.compile(pattern).search("", timeout=STOP_REGEX_SECONDS)
    except Exception as problem:  # the compiler's own error, or a recursion error of too deep a pattern
        bound = f"a regular expression ({type(problem).__name__}: {problem})"
        raise RequestError.for_field(field, pattern, bound) from problem
    _require(field, pattern, matches_nothing is None, "a pattern that does not match the empty text")


def _check_count(field: str, values: list[Any] | dict[int, float] | None, most: int, kind: str) -> None:
    if values is not None and len(values) > most:
        raise RequestError.for_field(field, f"{len(values)} {kind}", f"at most {most} {kind}")


def _check_ids(field: str, ids: list[int] | dict[int, float] | None, most: int) -> None:
    _check_count(field, ids, most, "ids")
    if ids and (min(ids) < 0 or max(ids) >= 2**31):
        raise RequestError.for_field(field, next(t for t in ids if not 0 <= t < 2**31), "token ids >= 0")


def _check_extra_args(extra_args: dict[str, Any] | None) -> None:
    bound = f"plain data of at most {MAX_EXTRA_ARGS_BYTES} bytes as MessagePack"
    try:
        size = len(msgspec.msgpack.encode(extra_args)) if _is_plain(extra_args) else -1
    except (OverflowError, UnicodeEncodeError):  # an int of more than 64 bits, half a surrogate pair
        size = -1
    _require("extra_args", extra_args, 0 <= size <= MAX_EXTRA_ARGS_BYTES, bound)


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether `value` reads the same on the other side of a wire."""
    if isinstance(value, dict) and depth < _MAX_EXTRA_ARGS_DEPTH:
        return all(isinstance(key, str) and _is_plain(item, depth + 1) for key, item in value.items())
    if isinstance(value, list) and depth < _MAX_EXTRA_ARGS_DEPTH:
        return all(_is_plain(item, depth + 1) for item in value)
    return value is None or type(value) in (bool, int, float, str)


NO_TRUNCATION = truncation_of(SamplingParams())
"""Values of `TRUNCATION_RULES` that cut nothing; the type of each is that of its column: int64 or float64."""
_NO_PENALTIES = penalties_of(SamplingParams())
