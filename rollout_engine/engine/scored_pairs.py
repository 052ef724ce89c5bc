"""Log-probs of given completions: the checks of prompts and completions, and the executor's scores."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from rollout_engine.errors import RequestError
from rollout_engine.text.prompts import as_token_ids


class Scorer(Protocol):
    """Computes scores: an executor."""

    @property
    def info(self) -> Any:
        """Sizes of its model."""
        ...

    def score(
        self, sequences: list[list[int]], num_prompt: list[int], temperature: float, adapter_slot: int = -1
    ) -> Iterator[dict[int, np.ndarray]]:
        """Yield, a piece at a time, the log-probs of some sequences by their index.

        Per sequence float32 [len - num_prompt]: of every token after the prompt, under the live weights and the adapter
        in a slot.
        """
        ...


def score_pairs(
    scorer: Scorer,
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    temperature: float,
    require_weights: Callable[[], None] = lambda: None,
    adapter_slot: int = -1,
) -> Generator[None, None, list[np.ndarray]]:
    """Compute log-probs of completions, per pair float32 [len(completion)], and yield between two pieces of the work.

    `require_weights` is called before each piece, and may raise. Temperature 0 counts as 1. A completion without tokens
    has no scores, and costs nothing. Raises `RequestError` for token ids outside the vocabulary, an empty prompt, or a
    pair longer than `max_model_len`.
    """
    require_weights()
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature >= 0):
        raise RequestError.for_field("temperature", temperature, "a finite number >= 0")
    if len(prompts) != len(completions):
        bound = f"one for each of the {len(prompts)} prompts"
        raise RequestError.for_field("completion_token_ids", f"a list of {len(completions)}", bound)
    pairs = [_checked(scorer.info, i, *pair) for i, pair in enumerate(zip(prompts, completions, strict=True))]
    asked = [i for i, (_, completion) in enumerate(pairs) if completion]
    scores = [np.zeros(0, dtype=np.float32) for _ in pairs]
    sequences = [prompt + completion for prompt, completion in (pairs[i] for i in asked)]
    num_left = len(asked)
    num_prompt = [len(pairs[i][0]) for i in asked]
    score = scorer.score if adapter_slot < 0 else partial(scorer.score, adapter_slot=adapter_slot)
    for found in score(sequences, num_prompt, temperature or 1.0) if asked else ():
        for k, value in found.items():
            scores[asked[k]] = value
        num_left -= len(found)
        if num_left:
            yield
            require_weights()
    return scores


def _checked(sizes: Any, index: int, prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
    prompt_ids = as_token_ids(prompt, f"prompt_token_ids[{index}]", sizes.vocab_size)
    completion_ids = as_token_ids(completion, f"completion_token_ids[{index}]", sizes.vocab_size)
    if not prompt_ids:
        raise RequestError.for_field(f"prompt_token_ids[{index}]", prompt, "at least one token long")
    num_tokens = len(prompt_ids) + len(completion_ids)
    if num_tokens > sizes.max_model_len:
        bound = f"at most max_model_len={sizes.max_model_len} tokens, prompt and completion together"
        raise RequestError.for_field(f"completion_token_ids[{index}]", f"{num_tokens} tokens", bound)
    return prompt_ids, completion_ids
