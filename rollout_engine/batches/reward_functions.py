"""Reward functions of users: how they are called, for any library's signature, and how their rewards are summed.

As in TRL, a function gets those of `prompts`, `completions` and `completion_ids` that it names, or all with `**kwargs`,
and columns likewise. Parameters that callers cannot name (`/`, `*args`) get the three lists in that order. By name it
also gets `pictures`: for each completion the tuple of its prompt's `PlacedPicture`, as in batch["pictures"]. A
parameter of any other name is a column: if the rollout does not have it, `check_columns` raises.
"""

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from PIL import Image

from rollout_engine.base.errors import RequestError, RewardError, did_you_mean
from rollout_engine.base.pictures import Picture

RewardFunction: TypeAlias = Callable[..., Iterable[float | None] | Awaitable[Iterable[float | None]]]
"""Returns one number per completion, or None if the function does not apply.

The lists it gets, and lists, dicts, sets, arrays and tensors in them, are copies, which it may modify. Images are not:
the completions of a prompt share them.
"""
RewardFunctions: TypeAlias = RewardFunction | Sequence[RewardFunction]

ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function, in addition to columns."""
PICTURES = "pictures"
"""A further argument, of functions that name it, and with `**kwargs` if a prompt has some."""

_NO_REWARD = "which is not finite in float32, the dtype of a batch's rewards"

_COPIED = (list, dict, set, bytearray, np.ndarray)
"""Types other than tensors that a reward function might modify. Objects of the user's own classes are passed without a
copy."""


LARGEST_REWARD = 3.4028234663852886e38
"""Largest float32: rewards are float32 in batches."""


class RewardCall:
    """One reward function, its name and weight."""

    def __init__(self, function: RewardFunction, name: str, weight: float) -> None:
        self.function, self.name, self.weight = function, name, weight
        parameters = _parameters(function)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._places = _places(parameters)
        by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        self._needed = by_place[len(ARGUMENTS) :] + [p.name for p in named if p.default is p.empty]

    def __call__(self, arguments: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
        """Call the function; `arguments` holds the lists of `ARGUMENTS`, `columns` one list per column."""
        places = [arguments[name] for name in self._places]
        by_name = {name: values for name, values in arguments.items() if name not in self._places}
        return self.function(*places, **{k: v for k, v in {**by_name, **columns}.items() if self.takes(k)})

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Parameters without a default that are no column and no argument of every reward function."""
        return [name for name in self._needed if name not in (*ARGUMENTS, *columns)]

    def takes(self, name: str) -> bool:
        """Whether the function accepts an argument of that name."""
        return self._takes_all or self.names(name)

    def names(self, name: str) -> bool:
        """Whether the function has a parameter of that name."""
        return name in self._names


def is_listed(reward_fn: object) -> TypeGuard[Sequence[RewardFunction]]:
    """Whether it is a list of functions rather than one function, which might be another kind of sequence."""
    return isinstance(reward_fn, list | tuple)


def reward_calls(reward_fn: RewardFunctions, weights: Sequence[float] | None) -> list[RewardCall]:
    """The functions with their names and weights, 1 by default. Raises `RequestError` for invalid ones."""
    functions: list[Any] = list(reward_fn) if is_listed(reward_fn) else [reward_fn]
    if not functions:
        raise RequestError.for_field("reward_fn", reward_fn, "a function or a list of at least one")
    for i, function in enumerate(functions):
        if not callable(function):
            where = f"reward_fn[{i}]" if is_listed(reward_fn) else "reward_fn"
            raise RequestError.for_field(where, function, "a function: reward_fn(prompts, completions, completion_ids)")
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions):
        raise RequestError.for_field("reward_weights", weights, f"a list of {len(functions)}, one per reward function")
    for i, weight in enumerate(weights):
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not abs(weight) < float("inf"):
            raise RequestError.for_field(f"reward_weights[{i}]", weight, "a finite number")
    names = _distinct([_name(function) for function in functions])
    return [RewardCall(*each) for each in zip(functions, names, map(float, weights), strict=True)]


def check_columns(calls: Sequence[RewardCall], columns: Collection[str]) -> None:
    """Raise `RewardError` for a column that no function accepts, and for a parameter that is no column."""
    for name in columns:
        if not any(call.takes(name) for call in calls):
            takers = ", ".join(call.name for call in calls)
            raise RewardError(
                f"No reward function takes the column '{name}' (asked: {takers}). Name it among the function's "
                "arguments, or add **kwargs."
            )
    for call in calls:
        if missing := call.missing([PICTURES, *columns]):
            hint = did_you_mean(missing[0], [*ARGUMENTS, *columns]) or f"Give it as columns={{'{missing[0]}': [...]}}."
            raise RewardError(
                f"The reward function '{call.name}' needs '{missing[0]}', which is no column. Arguments are passed by "
                f"name: {', '.join(ARGUMENTS)}, and the columns: {', '.join(columns) or 'none'}. {hint}"
            )


def reward_arguments(
    prompt: Any, texts: Sequence[str], token_ids: Iterable[list[int]], *, is_chat: bool
) -> dict[str, list[Any]]:
    """The lists of `ARGUMENTS` for several answers to one prompt; `is_chat`: the answers are conversations."""
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    return {
        "prompts": copies(prompt, len(texts)),
        "completions": messages if is_chat else list(texts),
        "completion_ids": [ids.copy() for ids in token_ids],
    }


def copies(value: Any, num: int) -> list[Any]:
    """One copy of `value` for each of `num` samples."""
    is_copied = isinstance(value, _COPIED) or hasattr(type(value), "__torch_function__")
    shared = _images_in(value) if is_copied else {}
    return [deepcopy(value, dict(shared)) if is_copied else value for _ in range(num)]


def checked_rewards(answer: object, num: int, where: str, label: str) -> list[float | None]:
    """Check the values of the function `label` for `num` samples. Raises `RewardError`, which begins `where`."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        what = f"returned {type(answer).__name__}, not a list of {num} numbers"
        raise RewardError(f"{where}: {label} {what}.")
    values = list(answer)
    if len(values) != num:
        why = "it is called for each prompt, with the completions of that one"
        raise RewardError(f"{where}: {label} returned {len(values)} rewards, not {num}: {why}.")
    return [None if value is None else _number(value, where, i) for i, value in enumerate(values)]


def weighted_sum(calls: Sequence[RewardCall], each: Sequence[Sequence[float | None]], where: str) -> list[float]:
    """Per sample, the sum of weight times reward over the functions that apply. Raises `RewardError` if none does."""
    sums = list[float]()
    for sample, rewards in enumerate(zip(*each, strict=True)):
        if all(reward is None for reward in rewards):
            raise RewardError(
                f"{where}, sample {sample}: the reward is None, not a finite number. None means that a "
                "function does not apply; at least one must."
            )
        pairs = zip(calls, rewards, strict=True)
        total = sum((call.weight * reward for call, reward in pairs if reward is not None), 0.0)
        if not is_reward(total):
            raise RewardError(f"{where}, sample {sample}: the weighted sum of the rewards is {total!r}, {_NO_REWARD}.")
        sums.append(total)
    return sums


def is_reward(number: float) -> bool:
    """Whether `number` is finite, in float32 too."""
    return abs(number) <= LARGEST_REWARD


def _images_in(value: Any) -> dict[int, Any]:
    """The images at any depth of a value, by their ids as `deepcopy` takes those of objects that it need not copy."""
    images: dict[int, Any] = {}
    seen, open_values = set[int](), [value]
    while open_values:
        each = open_values.pop()
        if isinstance(each, Image.Image | Picture):
            images[id(each)] = each
        elif isinstance(each, list | tuple | dict) and id(each) not in seen:
            seen.add(id(each))
            open_values += each.values() if isinstance(each, dict) else each
    return images


def _number(value: Any, where: str, index: int) -> float:
    plain = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    try:
        number = float(plain) if isinstance(plain, numbers.Real) else math.nan
        problem = "not a finite number" if not math.isfinite(number) else "" if is_reward(number) else _NO_REWARD
    except OverflowError:  # an int
        number, problem = math.inf, _NO_REWARD
    if problem:
        raise RewardError(f"{where}, sample {index}: the reward is {plain!r:.80}, {problem}.")
    return number


def _places(parameters: Sequence[inspect.Parameter]) -> Sequence[str]:
    """Which of `ARGUMENTS` are passed by position: to `/` parameters, and to `*args` behind the others."""
    kinds = [p.kind for p in parameters]
    num_unnamed = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        before = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if tuple(before) == ARGUMENTS[num_unnamed:][: len(before)]:
            return ARGUMENTS
    return ARGUMENTS[:num_unnamed]


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        any_place, any_name = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        return [inspect.Parameter("arguments", any_place), inspect.Parameter("columns", any_name)]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _distinct(names: list[str]) -> list[str]:
    """Names made unique: the second NAME becomes NAME_2, and so on."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct
