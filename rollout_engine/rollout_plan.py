"""Checks the arguments of one rollout: prompts, sampling parameters and columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollout_engine._structs import plain
from rollout_engine.errors import RequestError
from rollout_engine.reward_functions import ARGUMENTS
from rollout_engine.rollout_batch import RESERVED_KEYS
from rollout_engine.sampling_params import MAX_N, SamplingLike, SamplingParams, as_sampling_params
from rollout_engine.seeds import MAX_SEED, MIN_SEED, mix
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.input_processor import at_index
from rollout_engine.text.prompts import as_batch, with_chat_options

Columns = Mapping[str, Sequence[Any]]
"""Name -> one value per prompt."""


class RolloutPlan(NamedTuple):
    """Checked arguments of a rollout; every list has one entry per prompt."""

    prompts: list[Any]
    """The prompts as given, for reward functions."""
    params: list[SamplingParams]
    columns: Columns
    inputs: list[Any]
    """The prompts for the engine; conversations include their chat options."""

    @classmethod
    def of(
        cls,
        prompts: Any,
        params: SamplingLike | Sequence[SamplingLike] | None = None,
        num_samples: int | None = None,
        columns: Columns | None = None,
        seed: int | None = None,
        chat: ChatOptions | None = None,
    ) -> "RolloutPlan":
        """Check the arguments of `RolloutPolicy.rollout`. Raises `RequestError` where they do not fit together."""
        listed = _as_list(prompts)
        seed = _as_int("seed", seed, MIN_SEED, MAX_SEED)
        num_samples = _as_int("num_samples", num_samples, 1, MAX_N)
        if not isinstance(params, list | tuple):
            params = [as_sampling_params(params)] * len(listed)
        _same_length("sampling_params", params, listed)
        _check_columns(columns or {}, listed)
        if seed is None and all(each is params[0] for each in params):  # one object, so the engine checks it once
            each_params = [_for_rollout(params[0], num_samples, None, 0)] * len(listed)
        else:
            each_params = [_for_rollout(p, num_samples, seed, i) for i, p in enumerate(params)]
        return cls(listed, each_params, columns or {}, with_chat_options(listed, chat or {}))

    def row(self, index: int) -> dict[str, Any]:
        """Return each column's value for one prompt."""
        return {name: values[index] for name, values in self.columns.items()}


def _as_list(prompts: Any) -> list[Any]:
    """Make a list of prompts of one prompt, or of any sequence of them, such as a dataset's column."""
    if isinstance(prompts, Iterator):
        prompts = list(prompts)
    batch = as_batch(prompts)
    if batch == []:
        raise RequestError.for_field("prompts", prompts, "at least one prompt")
    return [prompts] if batch is None else batch


def _for_rollout(params: Any, num_samples: int | None, seed: int | None, index: int) -> SamplingParams:
    try:
        params = as_sampling_params(params)
    except RequestError as error:
        raise at_index("sampling_params", index, error) from error
    if num_samples is not None and params.n not in (1, num_samples):
        raise RequestError.for_field("num_samples", num_samples, f"equal to n={params.n}, or one of the two left out")
    if seed is not None and params.seed is not None:
        raise RequestError.for_field("seed", seed, f"absent when SamplingParams has seed={params.seed}")
    if params.prompt_logprobs is not None:
        hint = "A rollout has log-probs of sampled tokens; `score` or `LLM.generate` return those of prompts."
        raise RequestError.for_field("prompt_logprobs", params.prompt_logprobs, "absent in a rollout", hint)
    changes: dict[str, Any] = {"output_kind": "final_only", "logprobs": params.logprobs or 0}
    if num_samples is not None:
        changes["n"] = num_samples
    if seed is not None:
        changes["seed"] = mix(seed, index)
    changed: SamplingParams = params.clone(**changes)
    return changed


def _as_int(field: str, value: Any, low: int, high: int) -> int | None:
    number = plain(value)
    if number is not None and (type(number) is not int or not low <= number <= high):
        raise RequestError.for_field(field, value, f"an int in [{low}, {high}]")
    return number


def _check_columns(columns: Any, prompts: list[Any]) -> None:
    if not isinstance(columns, Mapping):
        raise RequestError.for_field("columns", columns, "a dict of lists")
    for name, values in columns.items():
        if not isinstance(name, str) or name in RESERVED_KEYS.union(ARGUMENTS):
            raise RequestError.for_field("columns", name, "another name: the rollout uses this one itself")
        _same_length(f"columns['{name}']", values, prompts)


def _same_length(field: str, values: Any, prompts: list[Any]) -> None:
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(prompts):
        raise RequestError.for_field(field, values, f"a list with one entry for each of {len(prompts)} prompts")
