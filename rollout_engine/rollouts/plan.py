"""Checks the arguments of rollouts: prompts or a dataset's rows, sampling parameters and columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.sampling_params import MAX_N, SamplingLike, SamplingParams, as_sampling_params
from rollout_engine.base.seeds import MAX_SEED, MIN_SEED, mix
from rollout_engine.base.structs import plain
from rollout_engine.batches.layout import RESERVED_KEYS
from rollout_engine.batches.reward_functions import ARGUMENTS
from rollout_engine.text.conversations import PROMPT_KINDS, ChatOptions
from rollout_engine.text.input_processor import at_index, one_each
from rollout_engine.text.prompts import PROMPT_KEYS, as_batch, with_chat_options, with_lora

Columns = Mapping[str, Sequence[Any]]
"""Name -> one value per prompt."""


class GroupTask(msgspec.Struct, frozen=True):
    """One prompt to sample: all that its group needs."""

    index: int
    prompt: Any
    """The prompt as given, for reward functions."""
    input: Any
    """The prompt for the engine; a conversation includes its chat options."""
    params: SamplingParams
    """`n`: samples to start."""
    num_kept: int | None = None
    """Samples to return, the first to end; None: all."""
    columns: Mapping[str, Any] = {}
    """Each column's value."""
    session_id: str | None = None
    """Over replicas, the session whose replica samples it."""

    def with_seed(self, seed: int) -> "GroupTask":
        """Return the task of the same samples with their seeds fixed: `seed` is that of sample 0."""
        if self.params.seed is not None:
            return self
        return msgspec.structs.replace(self, params=self.params.clone(seed=seed))


class RolloutPlan(NamedTuple):
    """Checked arguments of a rollout; every list has one entry per prompt."""

    prompts: list[Any]
    """The prompts as given, for reward functions."""
    params: list[SamplingParams]
    columns: Columns
    inputs: list[Any]
    """The prompts for the engine; conversations include their chat options."""
    num_kept: list[int | None]
    """Samples to return of each prompt, the first to end; None: all."""
    session_ids: list[str | None]

    @classmethod
    def of(
        cls,
        prompts: Any,
        params: SamplingLike | Sequence[SamplingLike] | None = None,
        num_samples: int | None = None,
        columns: Columns | None = None,
        seed: int | None = None,
        chat: ChatOptions | None = None,
        oversample: int | None = None,
        session_id: str | Sequence[str | None] | None = None,
        lora: LoRALike | None = None,
    ) -> "RolloutPlan":
        """Check the arguments of `RolloutPolicy.rollout`. Raises `RequestError` where they do not fit together."""
        listed = _as_list(prompts)
        seed = as_int("seed", seed, MIN_SEED, MAX_SEED)
        num_samples = as_int("num_samples", num_samples, 1, MAX_N)
        oversample = as_int("oversample", oversample, 1, MAX_N)
        if not isinstance(params, list | tuple):
            params = [as_sampling_params(params)] * len(listed)
        _same_length("sampling_params", params, listed)
        _check_columns(columns or {}, listed)
        if seed is None and all(each is params[0] for each in params):  # one object, so the engine checks it once
            each_params = [for_rollout(params[0], num_samples, None, 0)] * len(listed)
        else:
            each_params = [for_rollout(p, num_samples, seed, i) for i, p in enumerate(params)]
        num_kept: list[int | None] = [None] * len(listed)
        if oversample is not None:
            each_params, num_kept = map(list, zip(*(_oversampled(p, oversample) for p in each_params), strict=True))
        sessions = one_each("session_id", session_id, len(listed), "a str")
        inputs = with_lora(with_chat_options(listed, chat or {}), lora)
        return cls(listed, each_params, columns or {}, inputs, num_kept, sessions)

    def tasks(self) -> list[GroupTask]:
        """Return what to sample of each prompt."""
        rows = [{name: values[i] for name, values in self.columns.items()} for i in range(len(self.prompts))]
        indexes = range(len(self.prompts))
        columns = (indexes, self.prompts, self.inputs, self.params, self.num_kept, rows, self.session_ids)
        return [GroupTask(*each) for each in zip(*columns, strict=True)]


def dataset_tasks(
    dataset: Any,
    params: SamplingLike | None = None,
    num_samples: int | None = None,
    seed: int | None = None,
    chat: ChatOptions | None = None,
    oversample: int | None = None,
    lora: LoRALike | None = None,
) -> Iterator[GroupTask]:
    """Iterate over what to sample of each row of a dataset, with the seeds that a rollout of all rows would have.

    A row is a prompt, or a dictionary with a prompt (`prompt`, `prompt_token_ids` or `messages`); its other keys are
    columns. Raises `RequestError` where the arguments do not fit together, and at a row that does not fit the first.
    """
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        raise RequestError.for_field("dataset", dataset, "an iterable of prompts, or of rows with a prompt")
    if isinstance(params, list | tuple):
        raise RequestError.for_field("sampling_params", params, "one for all rows")
    seed = as_int("seed", seed, MIN_SEED, MAX_SEED)
    num_samples = as_int("num_samples", num_samples, 1, MAX_N)
    oversample = as_int("oversample", oversample, 1, MAX_N)
    shared, num_kept = for_rollout(as_sampling_params(params), num_samples, seed, 0), None
    if oversample is not None:
        shared, num_kept = _oversampled(shared, oversample)
    return _tasks(dataset, shared, num_kept, seed, chat or {}, lora)


def _tasks(
    dataset: Iterable[Any],
    shared: SamplingParams,
    num_kept: int | None,
    seed: int | None,
    chat: ChatOptions,
    lora: LoRALike | None,
) -> Iterator[GroupTask]:
    first: set[str] | None = None
    for index, row in enumerate(dataset):
        prompt, columns = split_row(row)
        for name in columns:
            _check_column_name(f"dataset[{index}]", name)
        if first is not None and first != columns.keys():
            what = f"with the columns of the first row, {sorted(first)}"
            raise RequestError.for_field(f"dataset[{index}]", sorted(columns), what)
        first = set(columns)
        params = shared if seed is None else shared.clone(seed=mix(seed, index))
        [input] = with_lora(with_chat_options([prompt], chat), lora)
        yield GroupTask(index, prompt, input, params, num_kept, columns)
    if first is None:
        raise RequestError.for_field("dataset", dataset, "at least one row long")


def split_row(row: Any) -> tuple[Any, dict[str, Any]]:
    """Divide a row of a dataset into its prompt and its columns."""
    if not isinstance(row, Mapping) or not any(kind in row for kind in PROMPT_KINDS):
        return row, {}
    prompt = {key: value for key, value in row.items() if key in PROMPT_KEYS}
    columns = {key: value for key, value in row.items() if key not in PROMPT_KEYS}
    return (prompt["prompt"] if prompt.keys() == {"prompt"} else prompt), columns


def _as_list(prompts: Any) -> list[Any]:
    """Make a list of prompts of one prompt, or of any sequence of them, such as a dataset's column."""
    if isinstance(prompts, Iterator):
        prompts = list(prompts)
    batch = as_batch(prompts)
    if batch == []:
        raise RequestError.for_field("prompts", prompts, "at least one prompt")
    return [prompts] if batch is None else batch


def for_rollout(params: Any, num_samples: int | None, seed: int | None, index: int) -> SamplingParams:
    """Check the params of prompt `index` and add what rollouts need. Raises `RequestError`."""
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


def _oversampled(params: SamplingParams, oversample: int) -> tuple[SamplingParams, int]:
    """Return the params of `oversample` samples, and how many of them to return."""
    if oversample < params.n:
        raise RequestError.for_field("oversample", oversample, f"at least the samples to return, {params.n}")
    return params.clone(n=oversample), params.n


def as_int(field: str, value: Any, low: int, high: int) -> int | None:
    """Return an int in [low, high] or None; numpy's will do. Raises `RequestError` for anything else."""
    number = plain(value)
    if number is not None and (type(number) is not int or not low <= number <= high):
        raise RequestError.for_field(field, value, f"an int in [{low}, {high}]")
    return number


def _check_columns(columns: Any, prompts: list[Any]) -> None:
    if not isinstance(columns, Mapping):
        raise RequestError.for_field("columns", columns, "a dict of lists")
    for name, values in columns.items():
        _check_column_name("columns", name)
        _same_length(f"columns['{name}']", values, prompts)


def _check_column_name(field: str, name: Any) -> None:
    if not isinstance(name, str) or name in RESERVED_KEYS.union(ARGUMENTS):
        raise RequestError.for_field(field, name, "another name: the rollout uses this one itself")


def _same_length(field: str, values: Any, prompts: list[Any]) -> None:
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(prompts):
        raise RequestError.for_field(field, values, f"a list with one entry for each of {len(prompts)} prompts")
