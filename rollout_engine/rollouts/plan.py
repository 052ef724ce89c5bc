"""Checks the arguments of rollouts: prompts or a dataset's rows, sampling parameters and columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.sampling_params import MAX_N, SamplingParams, as_sampling_params
from rollout_engine.base.seeds import MAX_SEED, MIN_SEED, mix
from rollout_engine.base.structs import plain
from rollout_engine.base.version_pin import with_versions
from rollout_engine.batches.layout import RESERVED_KEYS
from rollout_engine.batches.reward_functions import ARGUMENTS, RewardFunctions
from rollout_engine.batches.rollout_batch import Layout
from rollout_engine.text.conversations import PROMPT_KINDS
from rollout_engine.text.input_processor import at_index, one_each
from rollout_engine.text.picture_parts import holds_pictures
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


class TeacherChecks(Protocol):
    """The teachers of a rollout, which check that they fit it: `rollouts.teachers.TeacherColumns`."""

    def check(self, params: Sequence[SamplingParams], columns: Mapping[str, Any] | None) -> None:
        """Raise if a teacher does not fit these sampling parameters and columns; None: they are not known yet."""

    def prepare_prompts(self, tasks: Sequence[GroupTask]) -> None:
        """Make the prompts that teachers alone see. Raises `RequestError` for wrong ones."""

    def refuse_prompts(self, reason: str) -> None:
        """Raise `RequestError`, with the reason, if a teacher is to see a prompt of its own."""


class RolloutArguments(msgspec.Struct, frozen=True):
    """Arguments of `rollout`, `arollout` and `collect` as they were given; `RolloutPolicy.rollout` describes them."""

    prompts: Any = None
    """The dataset of `collect`."""
    sampling_params: Any = None
    num_samples: int | None = None
    columns: Columns | None = None
    reward_fn: RewardFunctions | None = None
    reward_weights: Sequence[float] | None = None
    seed: int | None = None
    layout: Layout = "padded"
    oversample: int | None = None
    session_id: str | Sequence[str | None] | None = None
    lora_request: LoRALike | None = None
    options: Mapping[str, Any] = {}
    """`ChatOptions`, and in a rollout `EpisodeOptions`."""
    teachers: "TeacherChecks | None" = None
    """The rollout's teachers."""
    policy_version: int | None = None
    min_policy_version: int | None = None

    def normalize(self) -> "RolloutArguments":
        """The same with Python's own numbers, and versions as sampling parameters. Raises `RequestError`."""
        return msgspec.structs.replace(
            self,
            sampling_params=with_versions(self.sampling_params, self.policy_version, self.min_policy_version),
            seed=as_int("seed", self.seed, MIN_SEED, MAX_SEED),
            num_samples=as_int("num_samples", self.num_samples, 1, MAX_N),
            oversample=as_int("oversample", self.oversample, 1, MAX_N),
        )

    def engine_inputs(self, prompts: list[Any]) -> Any:
        """The prompts for the engine: conversations include their chat options."""
        return with_lora(with_chat_options(prompts, self.options), self.lora_request)  # type: ignore[arg-type]

    def params_of(self, params: Any, index: int) -> tuple[SamplingParams, int | None]:
        """Params of prompt `index`, and how many of their samples to return (None: all). Raises `RequestError`."""
        params = for_rollout(params, self.num_samples, self.seed, index)
        if self.oversample is None:
            return params, None
        if self.oversample < params.n:
            bound = f"at least the samples to return, {params.n}"
            raise RequestError.for_field("oversample", self.oversample, bound)
        return params.clone(n=self.oversample), params.n


def prompt_tasks(arguments: RolloutArguments) -> list[GroupTask]:
    """Make one task for each prompt. Raises `RequestError` if the arguments do not fit together."""
    prompts = _as_list(arguments.prompts)
    arguments = arguments.normalize()
    params, columns = arguments.sampling_params, arguments.columns or {}
    if not isinstance(params, list | tuple):
        params = [as_sampling_params(params)] * len(prompts)
    _same_length("sampling_params", params, prompts)
    _check_columns(columns, prompts)
    if arguments.seed is None and all(each is params[0] for each in params):  # one object, so that it is checked once
        resolved = [arguments.params_of(params[0], 0)] * len(prompts)
    else:
        resolved = [arguments.params_of(each, index) for index, each in enumerate(params)]
    sessions = one_each("session_id", arguments.session_id, len(prompts), "a str")
    inputs = arguments.engine_inputs(prompts)
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
    for i, row in enumerate(rows):
        _refuse_unseen_images("columns", prompts[i], row)
    return [GroupTask(i, prompts[i], inputs[i], *resolved[i], rows[i], sessions[i]) for i in range(len(prompts))]


def row_tasks(arguments: RolloutArguments) -> Iterator[GroupTask]:
    """Iterate over the tasks of a dataset's rows, with the seeds that a rollout of all rows would have.

    A row is a prompt, or a dictionary with a prompt (`prompt`, `prompt_token_ids` or `messages`); its other keys are
    columns. Raises `RequestError` if the arguments do not fit together, and at a row that does not fit the first.
    """
    dataset, params = arguments.prompts, arguments.sampling_params
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        raise RequestError.for_field("dataset", dataset, "an iterable of prompts, or of rows with a prompt")
    if isinstance(params, list | tuple):
        raise RequestError.for_field("sampling_params", params, "one for all rows")
    arguments = arguments.normalize()
    return _row_tasks(arguments, *arguments.params_of(as_sampling_params(params), 0))


def _row_tasks(arguments: RolloutArguments, shared: SamplingParams, num_kept: int | None) -> Iterator[GroupTask]:
    first: set[str] | None = None
    for index, row in enumerate(arguments.prompts):
        prompt, columns = split_row(row)
        for name in columns:
            _check_column_name(f"dataset[{index}]", name)
        if first is not None and first != columns.keys():
            what = f"with the columns of the first row, {sorted(first)}"
            raise RequestError.for_field(f"dataset[{index}]", sorted(columns), what)
        first = set(columns)
        _refuse_unseen_images(f"dataset[{index}]", prompt, columns)
        params = shared if arguments.seed is None else shared.clone(seed=mix(arguments.seed, index))
        [input] = arguments.engine_inputs([prompt])
        yield GroupTask(index, prompt, input, params, num_kept, columns)
    if first is None:
        raise RequestError.for_field("dataset", arguments.prompts, "at least one row long")


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
    """Check the params of prompt `index` and add the fields that rollouts need. Raises `RequestError`."""
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


def _refuse_unseen_images(field: str, prompt: Any, columns: Mapping[str, Any]) -> None:
    """Raise `RequestError` for images in columns of a prompt without pictures: the model would see none."""
    if holds_pictures(prompt) or (isinstance(prompt, Mapping) and prompt.get("pictures") is not None):
        return
    for name in ("image", "images"):
        value = columns.get(name)
        images = [each for each in (value if isinstance(value, list | tuple) else [value]) if each is not None]
        if images and not isinstance(images[0], str):
            hint = (
                "Columns reach rewards, not the model. Give them as 'multi_modal_data': {'image': [...]} of the prompt "
                "or as parts of its messages, or name the column otherwise."
            )
            raise RequestError.for_field(f"{field}[{name!r}]", f"{len(images)} images", "absent for a text", hint)


def _same_length(field: str, values: Any, prompts: list[Any]) -> None:
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(prompts):
        raise RequestError.for_field(field, values, f"a list with one entry for each of {len(prompts)} prompts")
