"""Scores of given completions: the checks of prompts and completions, and the executor's scores."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PictureInfo, SharedPictures
from rollout_engine.base.routed_experts import RoutingInfo, checked_rows
from rollout_engine.base.token_scores import AskedScores, TokenScores, check_num_top, divide_candidates
from rollout_engine.text.prompts import as_token_ids


class Scorer(Protocol):
    """Computes scores: an executor."""

    @property
    def info(self) -> Any:
        """Sizes of its model."""
        ...

    def score(
        self, sequences: list[list[int]], num_prompt: list[int], temperature: float, **options: Any
    ) -> Iterator[dict[int, TokenScores]]:
        """Yield, a piece at a time, the scores of some sequences by their index: of every token after the prompt.

        `options`: as in `model.backend.Backend.score`.
        """
        ...


def score_pairs(
    scorer: Scorer,
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    temperature: float,
    require_weights: Callable[[], None] = lambda: None,
    *,
    adapter_slot: int = -1,
    routed_experts: Sequence[np.ndarray] | None = None,
    pictures: SharedPictures | None = None,
    candidate_ids: np.ndarray | None = None,
    num_top: int = 0,
) -> Generator[None, None, list[TokenScores]]:
    """Score completions, each with its prompt, and yield between two pieces of the work. Returns those of each pair.

    `require_weights` is called before each piece, and may raise. Temperature 0 counts as 1. A completion without tokens
    has no scores, and costs nothing. `candidate_ids`: integers [N, K], of all tokens of the completions end to end;
    `num_top`: most likely tokens of each place. Raises `RequestError` for token ids outside the vocabulary, an empty
    prompt, a pair longer than `max_model_len`, and arguments that do not fit the pairs or the model.
    """
    require_weights()
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature >= 0):
        raise RequestError.for_field("temperature", temperature, "a finite number >= 0")
    if len(prompts) != len(completions):
        bound = f"one for each of the {len(prompts)} prompts"
        raise RequestError.for_field("completion_token_ids", f"a list of {len(completions)}", bound)
    pairs = [_check_pair(scorer.info, i, *pair) for i, pair in enumerate(zip(prompts, completions, strict=True))]
    routed = _checked_routing(scorer, pairs, routed_experts)
    asked = [i for i, (_, completion) in enumerate(pairs) if completion]
    more = _checked_scores([len(completion) for _, completion in pairs], scorer.info, candidate_ids, num_top)
    scores = [TokenScores.empty(None if candidate_ids is None else candidate_ids.shape[1], num_top)] * len(pairs)
    sequences = [prompt + completion for prompt, completion in (pairs[i] for i in asked)]
    num_left = len(asked)
    num_prompt = [len(pairs[i][0]) for i in asked]
    options: dict[str, Any] = {} if adapter_slot < 0 else {"adapter_slot": adapter_slot}
    if routed is not None:
        options["routed_experts"] = [routed[i] for i in asked]
    if pictures is not None and any(pictures.places):
        _check_pictures(scorer.info.pictures, [len(prompt) + len(completion) for prompt, completion in pairs], pictures)
        options["pictures"] = SharedPictures(pictures.arrays, [pictures.places[i] for i in asked])
    if more is not None:
        options["asked"] = more.of(asked)
    for found in scorer.score(sequences, num_prompt, temperature or 1.0, **options) if asked else ():
        for k, value in found.items():
            scores[asked[k]] = value
        num_left -= len(found)
        if num_left:
            yield
            require_weights()
    return scores


def _checked_scores(
    lengths: Sequence[int], sizes: Any, candidate_ids: np.ndarray | None, num_top: int
) -> AskedScores | None:
    """The scores asked for of completions with these lengths, in addition to their tokens' own; None: no others."""
    if candidate_ids is None and not num_top:
        return None
    check_num_top(num_top, sum(lengths), sizes.vocab_size)
    return AskedScores(divide_candidates(candidate_ids, lengths, sizes.vocab_size), num_top)


def _check_pair(sizes: Any, index: int, prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
    prompt_ids = as_token_ids(prompt, f"prompt_token_ids[{index}]", sizes.vocab_size)
    completion_ids = as_token_ids(completion, f"completion_token_ids[{index}]", sizes.vocab_size)
    if not prompt_ids:
        raise RequestError.for_field(f"prompt_token_ids[{index}]", prompt, "at least one token long")
    num_tokens = len(prompt_ids) + len(completion_ids)
    if num_tokens > sizes.max_model_len:
        bound = f"at most max_model_len={sizes.max_model_len} tokens, prompt and completion together"
        raise RequestError.for_field(f"completion_token_ids[{index}]", f"{num_tokens} tokens", bound)
    return prompt_ids, completion_ids


def _checked_routing(
    scorer: Scorer, pairs: Sequence[tuple[list[int], list[int]]], given: Sequence[np.ndarray] | None
) -> list[np.ndarray] | None:
    """The experts to replay for each pair, int16 [tokens - 1, L, k]; None if none were given."""
    if given is None:
        return None
    info: RoutingInfo | None = scorer.info.routing
    if info is None:
        hint = "This engine's model has no routers that are all alike."
        raise RequestError.for_field("routed_experts", f"those of {len(given)} pairs", "None", hint)
    if len(given) != len(pairs):
        raise RequestError.for_field("routed_experts", f"a list of {len(given)}", f"one for each of {len(pairs)} pairs")
    counts = [len(prompt) + len(completion) for prompt, completion in pairs]
    return [checked_rows(f"routed_experts[{i}]", each, counts[i], info) for i, each in enumerate(given)]


def _check_pictures(info: PictureInfo | None, lengths: Sequence[int], given: SharedPictures) -> None:
    """Raise `RequestError` unless the model takes pictures, and these fit pairs of `lengths` tokens."""
    refusal = "This engine's model takes no pictures." if info is None else info.unsupported_reason
    if refusal:
        raise RequestError.for_field("pictures", f"{len(given.arrays)} pictures", "None", refusal)
    if len(given.places) != len(lengths):
        bound = f"one for each of {len(lengths)} pairs"
        raise RequestError.for_field("pictures", f"a list of {len(given.places)}", bound)
    for index, (places, length) in enumerate(zip(given.places, lengths, strict=True)):
        last = 0
        for start, end, number in places:
            if not (last <= start < end <= length and 0 <= number < len(given.arrays)):
                bound = f"in order, apart, and inside its pair of {length} tokens"
                raise RequestError.for_field(f"pictures[{index}]", f"at [{start}, {end})", bound)
            last = end
