"""Results of requests and of weight updates."""

from typing import Any, Literal

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture

FinishReason = Literal["stop", "length", "abort", "error"]
Quantization = Literal["int8"]
"""How an engine rounds the weights of layers."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a completion were sampled by `policy_version`, over KV no older than `kv_min_version`.

    Exact (equal bit for bit to the trainer's forward) where the two versions are equal, and the completion's
    `quantization` is None.
    """

    start: int
    end: int
    policy_version: int
    kv_min_version: int


class RequestMetrics(msgspec.Struct):
    """Timings of one request, seconds on one monotonic clock."""

    arrival_time: float
    scheduled_time: float | None = None
    """Start of the first step that computed any of the prompt."""
    first_token_time: float | None = None
    finished_time: float | None = None


class Logprob(msgspec.Struct, frozen=True):
    """One token at one position."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None if ranks were not asked for (`logprobs=0`)."""
    decoded_token: str | None
    """Its text inside a text; None without a tokenizer."""


class CompletionOutput(msgspec.Struct):
    """One sample of a prompt; with `output_kind="delta"` only the part that is new since the last output."""

    index: int
    """Which of the n samples."""
    text: str
    token_ids: list[int]
    """Sampled ids, end token included."""
    logprobs: np.ndarray | None
    """float32 [T], natural log, of the sampled tokens (`logprobs_mode`)."""
    top_logprobs: tuple[np.ndarray, np.ndarray] | None
    """(int32 [T, k] ids, float32 [T, k] log-probs), most likely first, ties to the lowest id."""
    cumulative_logprob: float | None
    """Sum of `logprobs`."""
    kept_logprob_mass: np.ndarray | None
    """float32 [T], log of the tempered mass of the tokens that top-k, top-p and min-p kept, 0 of forced tokens; None
    without them."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop id or stop string; None for the checkpoint's end token."""
    version_spans: list[VersionSpan]
    seed: int
    """Sequence seed: resubmitted with n=1 it replays this sample."""
    error: str | None = None
    sampled_ranks: np.ndarray | None = None
    """int32 [T], 1 for the most likely token, ties to the lowest id; None unless `logprobs` is -1 or at least 1."""
    token_id_logprobs: np.ndarray | None = None
    """float32 [T, number of `logprob_token_ids`], in their order."""
    routed_experts: np.ndarray | None = None
    """uint8 (int16 beyond 256 experts) [P + T - 1, layers with a router, k]: the experts of each token of prompt and
    completion but the last, which was not computed. Those of the token before a sampled one are the ones that it was
    sampled with, by the version of its span. "delta": the first output begins with the prompt's. None unless
    `return_routed_experts`, and if nothing was sampled."""
    quantization: Quantization | None = None
    """"int8": the weights of layers were rounded, so log-probs are close to the trainer's and not equal to them."""
    support: tuple[np.ndarray, np.ndarray] | None = None
    """(int64 offsets [T + 1], int32 ids): token i was drawn from `ids[offsets[i]:offsets[i + 1]]`, ascending; from the
    whole vocabulary if these are none. None unless `return_support`."""
    entropies: np.ndarray | None = None
    """float32 [T], nats: of softmax(logits / temperature) of the model's own logits, from which each token was drawn;
    greedy ones count as temperature 1. None unless `entropy`."""
    hidden_states: np.ndarray | None = None
    """float32 [T, H], the values of the model's dtype: row t is the last layer's state, behind the final norm, from
    which token t was drawn: that of the position before. None unless `return_hidden_states`, and without tokens."""
    forced: np.ndarray | None = None
    """bool [T], tokens that `thinking_budget` forced: they were not drawn, and their log-probs are the policy's as of
    any other; "processed" ones are 0, since nothing else was left to draw. None without a budget."""

    def logprob_dicts(self, tokenizer: Any = None) -> list[dict[int, Logprob]]:
        """Return for each token {token id: Logprob}: the sampled token first, then the most likely ones.

        With `tokenizer`, a Hugging Face one such as `llm.get_tokenizer()`, they have texts. The dicts are made on each
        call. Raises `RequestError` if no log-probs were asked for.
        """
        if self.logprobs is None:
            raise RequestError("logprob_dicts: there are no log-probs. Ask for them: SamplingParams(logprobs=...).")
        ranks = None if self.sampled_ranks is None else self.sampled_ranks.tolist()
        return _dicts(self.token_ids, self.logprobs, ranks, self.top_logprobs, TokenTexts(tokenizer))


class PoolingOutput(msgspec.Struct, frozen=True):
    """Result of a pooling request."""

    data: np.ndarray | None = None
    """float32, in a shape of `PoolingParams`; None if the request was aborted or failed."""
    policy_version: int = -1
    """Version of the weights when it was complete; -1 if it is not."""
    kv_min_version: int = -1
    """The oldest version among the KV that it attended: exact if the two are equal."""
    finish_reason: FinishReason | None = None
    """"stop" if there is a result."""
    error: str | None = None


class RequestOutput(msgspec.Struct):
    """A prompt and its n samples so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: np.ndarray | None
    """float32 [P], natural log, NaN for the first token; None unless asked for. "delta": in the first output only."""
    outputs: list[CompletionOutput]
    """Samples in index order. While streaming: those that have something new."""
    finished: bool
    num_cached_tokens: int
    """Prompt tokens served from the prefix cache when the request first began. What is computed again later, after a
    preemption or at another replica, is counted in the metric `num_recomputed_tokens` alone."""
    metrics: RequestMetrics | None = None
    prompt_top_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    """(int32 [P, k] ids, float32 [P, k] log-probs), most likely first; -1 and NaN in the first row."""
    num_dropped: int = 0
    """Samples that were started and are not in `outputs`: others had ended first (`oversample` of a rollout)."""
    pooled: PoolingOutput | None = None
    """Result of a request with `PoolingParams`, whose only sample has no tokens; None for others."""
    prompt_ranks: np.ndarray | None = None
    """int32 [P], 1 for the most likely token, ties to the lowest id, 0 for the first token; with `prompt_logprobs`."""
    pictures: list[PlacedPicture] = []
    """Pictures of the prompt at their places in `prompt_token_ids`, which have one placeholder for each feature."""
    prompt_hidden_states: np.ndarray | None = None
    """float32 [P, H]: row i is the state of prompt token i; the last is row 0 of `CompletionOutput.hidden_states`.
    None unless `return_hidden_states="all"`; "delta": in the first output only."""

    def prompt_logprob_dicts(self, tokenizer: Any = None) -> list[dict[int, Logprob] | None]:
        """Return for each prompt token a dict as `CompletionOutput.logprob_dicts` does; None for the first token."""
        if self.prompt_logprobs is None:
            what = "prompt_logprob_dicts: there are no log-probs of the prompt"
            raise RequestError(f"{what}. Ask for them: SamplingParams(prompt_logprobs=...).")
        ranks = None if self.prompt_ranks is None else self.prompt_ranks.tolist()
        top, texts = self.prompt_top_logprobs, TokenTexts(tokenizer)
        rows = _dicts(self.prompt_token_ids, self.prompt_logprobs, ranks, top, texts)
        return [None, *rows[1:]]


class PoolingRequestOutput(msgspec.Struct):
    """A prompt and its pooled output: the result of `encode` and `reward`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """Tokens that were pooled: without the pad tokens at the end if a head for sequences is read before them."""
    outputs: PoolingOutput
    finished: bool
    num_cached_tokens: int
    """Prompt tokens served from the prefix cache: only if the last token alone is pooled."""
    metrics: RequestMetrics | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> "PoolingRequestOutput":
        """The same output of a pooling request."""
        assert output.pooled is not None, "a pooling request"
        return cls(
            request_id=output.request_id,
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            outputs=output.pooled,
            finished=output.finished,
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
        )


class UpdateReport(msgspec.Struct, frozen=True):
    """Report of one weight update."""

    version: int
    digest: str
    """Digest of the manifest, over the digests of the live parameters after the commit."""
    num_tensors: int
    num_bytes: int
    seconds: float
    """Seconds from begin to commit."""
    stall_seconds: float
    """Time in which generation could not step."""
    num_in_flight: int
    """Requests alive across the commit."""
    staging: Literal["shadow", "inplace"] = "shadow"
    """"shadow": new weights were staged next to the live ones, which served until the commit. "inplace": over them."""
    num_shadow_bytes: int = 0
    """Bytes held in addition to the live weights, from this update to the next."""
    pack_seconds: float = 0.0
    """The part of `seconds` in which the received weights were packed for the kernels."""
    replicas: "dict[int, UpdateReport]" = {}
    """The report of each replica of a fleet, by its index; the times above are then the longest of them."""
    num_bytes_sent: int = 0
    """Bytes of the tensors and pieces that the engine took: those that had changed, or all `num_bytes`."""
    adapter: Literal["merged", "alone"] | None = None
    """How the active adapters of a `PeftModel` arrived: "merged" into the weights; "alone", without the base's weights,
    by merge=False. None: the source had none."""
    changed_share: float | None = None
    """Share of the model's elements that differ from those before, in the engine's dtype: an estimate from up to 1,024
    elements of each of 128 tensors (`weights/changed_share.py`). None: not known, as on devices and over ranks, and
    if the weights before had arrived under other names or were forgotten."""


def _dicts(
    token_ids: list[int],
    logprobs: np.ndarray,
    ranks: list[int] | None,
    top: tuple[np.ndarray, np.ndarray] | None,
    texts: "TokenTexts",
) -> list[dict[int, Logprob]]:
    """Make a dict for each of `token_ids`: itself, then the tokens in its row of `top`, ranked by their place."""
    made = []
    for position, token_id in enumerate(token_ids):
        found = {token_id: Logprob(float(logprobs[position]), ranks[position] if ranks else None, texts[token_id])}
        if top is not None:
            ids, values = (column[position].tolist() for column in top)
            for rank, (other, logprob) in enumerate(zip(ids, values, strict=True), start=1):
                if other >= 0 and (other not in found or found[other].rank is None):  # -1: fewer than were asked for
                    found[other] = Logprob(logprob, rank, texts[other])
        made.append(found)
    return made


class TokenTexts(dict[int, str | None]):
    """Token id -> its text as a second token adds it to a first, since some tokenizers strip the space of one alone."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise RequestError.for_field("tokenizer", tokenizer, "a tokenizer, such as llm.get_tokenizer(), or None")
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        once, twice = (
            self._tokenizer.decode([token_id] * count, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for count in (1, 2)
        )
        text: str = twice[len(once) :]
        self[token_id] = text
        return text
