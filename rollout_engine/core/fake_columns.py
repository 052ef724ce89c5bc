"""Columns of results that the fake runner makes up: values that identify their tokens."""

import numpy as np

from rollout_engine.base.messages import ModelRunnerOutput, PromptLogprobs
from rollout_engine.base.sampling_params import SamplingParams


def fake_entropy(token_id: int) -> float:
    """The entropy that the fake model reports with a token."""
    return 0.5 + token_id / 4096


def fake_support(token_id: int, params: SamplingParams) -> np.ndarray:
    """The support that the fake model reports with a token: with truncation the id before it and its own, else all."""
    return np.arange(max(0, token_id - 1), token_id + 1, dtype=np.int32) if params.truncates else np.empty(0, np.int32)


def fake_states(token_ids: list[int]) -> np.ndarray:
    """The hidden states of the fake model, float32 [n, 2]: rows (token id, 1)."""
    return np.array([[token_id, 1.0] for token_id in token_ids], np.float32).reshape(-1, 2)


def prompt_columns(token_ids: list[int], params: SamplingParams, vocab_size: int) -> PromptLogprobs:
    """Made-up log-probs of a prompt that identify its tokens, for params with `prompt_logprobs`."""
    ids = np.array(token_ids, dtype=np.int32)
    logprobs = (-1.0 - ids / vocab_size).astype(np.float32)
    logprobs[0] = np.nan
    width = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
    top = (np.repeat(ids[:, None], width, 1), np.repeat(logprobs[:, None], width, 1)) if width else None
    ranks = ids + 1
    ranks[0] = 0
    return PromptLogprobs(logprobs, top, ranks)


def with_columns(
    token_ids: list[int], params: list[SamplingParams], errors: dict[int, str], vocab_size: int
) -> ModelRunnerOutput:
    """Make up log-probs that identify their token: -1 - id / vocab_size, with the next ids as runners-up."""
    output = ModelRunnerOutput(token_ids, None, errors=errors)
    if any(p.logprobs is not None for p in params):
        output.logprobs = [-1.0 - token_id / vocab_size for token_id in token_ids]
    if any(p.truncates for p in params):
        output.kept_logprob_mass = [-0.125 if p.truncates else 0.0 for p in params]
    if any(p.wants_ranks for p in params):
        asks = [p.wants_ranks for p in params]
        output.sampled_ranks = np.where(asks, np.array(token_ids, np.int32) + 1, 0).astype(np.int32)
    if any(p.entropy for p in params):
        pairs = zip(token_ids, params, strict=True)
        output.entropies = np.array([fake_entropy(i) if p.entropy else 0.0 for i, p in pairs], np.float32)
    if any(p.return_hidden_states for p in params):
        output.hidden_states = fake_states(token_ids)
    for index, each in enumerate(params):
        asked = range(vocab_size) if each.logprobs == -1 else each.logprob_token_ids
        if asked and index not in errors:
            output.id_logprobs[index] = -1.0 - np.array(asked, np.float32) / vocab_size
        if each.return_support and index not in errors:
            output.supports[index] = fake_support(token_ids[index], each)
    width = max((p.num_top_logprobs for p in params), default=0)
    if width:
        shifts = np.arange(width, dtype=np.int32)
        ids = (np.array(token_ids, dtype=np.int32)[:, None] + shifts) % vocab_size
        values = np.array(output.logprobs, dtype=np.float32)[:, None] - shifts.astype(np.float32)
        output.top_logprobs = (ids.astype(np.int32), values)
    return output
