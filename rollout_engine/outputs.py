"""What a request gives back."""

from typing import Literal

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a completion were sampled by `policy_version`, over KV no older than `kv_min_version`.

    Exact (equal bit for bit to the trainer's forward) where the two versions are equal.
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


class CompletionOutput(msgspec.Struct):
    """One sample of a prompt; with `output_kind="delta"` only what is new since the last output."""

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
    """float32 [T], log of the tempered mass of the tokens that could be drawn; None without top-k, top-p and min-p."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop id or stop string; None for the checkpoint's end token."""
    version_spans: list[VersionSpan]
    seed: int
    """Sequence seed: resubmitted with n=1 it replays this sample."""
    error: str | None = None


class RequestOutput(msgspec.Struct):
    """A prompt and its n samples so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: np.ndarray | None
    """float32 [P], natural log, NaN for the first token; None unless asked for. "delta": in the first output only."""
    outputs: list[CompletionOutput]
    """In index order. While streaming: the samples that have something new."""
    finished: bool
    num_cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    metrics: RequestMetrics | None = None
    prompt_top_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    """(int32 [P, k] ids, float32 [P, k] log-probs), most likely first; -1 and NaN in the first row."""


class UpdateReport(msgspec.Struct, frozen=True):
    """What one weight update did."""

    version: int
    digest: str
    """The manifest's, over the digests of the live parameters after the commit."""
    num_tensors: int
    num_bytes: int
    seconds: float
    """From begin to commit."""
    stall_seconds: float
    """How long generation could not step."""
    num_in_flight: int
    """Requests alive across the commit."""
    staging: Literal["shadow", "inplace"] = "shadow"
    """Whether the old weights could have served on until the commit."""
    num_shadow_bytes: int = 0
    """Bytes held beside the live weights, from this update to the next."""
    pack_seconds: float = 0.0
    """Of `seconds`, those that laid the weights out for the kernels once all had come."""
