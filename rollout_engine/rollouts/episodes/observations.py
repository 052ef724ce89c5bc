"""Checks and normalises the results of an environment, in the process that runs it."""

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from envs_adapters.base import Message, Observation
from rollout_engine.base.errors import RequestError, refused, text_of
from rollout_engine.base.structs import plain
from rollout_engine.batches.reward_functions import is_reward
from rollout_engine.rollouts.episodes.observed_pictures import MAX_PICTURE_BYTES, as_picture_bytes, num_picture_bytes

MAX_TEXT_BYTES = 1 << 20
"""Text of one observation, as UTF-8."""
_NUM_STEP_FIELDS = 5
_NUM_RESET_FIELDS = 2
_MAX_DEPTH = 16
_ATTRIBUTES = ("messages", "reward", "terminated", "truncated")
_ACCEPTED = "an Observation or the tuple (messages, reward, terminated, truncated, info)"


class ObservationError(ValueError):
    """An environment returned something that is no observation; the message names it and the reason."""


def as_observation(value: Any, num_seats: int = 1, seat: int | None = None) -> Observation:
    """Check and normalise the result of a step of `seat`, or of a reset (`seat=None`).

    Accepts an `Observation`, an object with its attributes, and gymnasium's tuple of five; of a reset also messages
    alone (a text, one message, a list of them) and gymnasium's (messages, info). In the result `messages` is a text or
    a list of messages, pictures in them the bytes of files, `reward` a dict {seat: finite float}, `info` a dict. Raises
    `ObservationError`.
    """
    messages, reward, terminated, truncated, info, next_seat = _fields(value, is_reset=seat is None)
    return Observation(
        messages=_messages(messages),
        reward=_rewards(reward, num_seats, seat),
        terminated=_flag("terminated", terminated),
        truncated=_flag("truncated", truncated),
        info=_info(info),
        seat=_seat("seat", next_seat, num_seats),
    )


def as_num_seats(value: Any) -> int:
    """Check an environment's `num_seats`. Raises `ObservationError`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ObservationError(refused("num_seats", value, "an int of at least 1"))
    return number


def plain_data(value: Any, depth: int = 0) -> Any:
    """The value as dicts with text keys, lists, texts, numbers, bools and None, which msgpack carries.

    Arrays and scalars of numpy and torch become lists and numbers; anything else becomes its `repr`.
    """
    kind = type(value)
    if kind is str:
        return value if value.isascii() else value.encode(errors="replace").decode()
    if value is None or kind in (float, bool, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else text_of(value, repr)
    if depth == _MAX_DEPTH:
        return _text(value)
    if isinstance(value, Mapping):
        return {str(plain_data(key, _MAX_DEPTH)): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(item, depth + 1) for item in value]
    read = plain(value)
    return plain_data(_text(value) if read is value else read, depth + 1)


def _text(value: Any) -> str:
    return text_of(value, repr).encode(errors="replace").decode()


def _fields(value: Any, *, is_reset: bool) -> tuple[Any, Any, Any, Any, Any, Any]:
    if isinstance(value, Observation) or all(hasattr(value, name) for name in _ATTRIBUTES):
        info, seat = getattr(value, "info", {}), getattr(value, "seat", 0)
        return value.messages, value.reward, value.terminated, value.truncated, info, seat
    if isinstance(value, tuple) and len(value) == _NUM_STEP_FIELDS:
        return (*value, 0)
    if not is_reset:
        raise ObservationError(refused("the observation", value, f"{_ACCEPTED}, not {type(value).__name__}"))
    if isinstance(value, tuple) and len(value) == _NUM_RESET_FIELDS and _is_info(value[1]):
        return value[0], 0.0, False, False, value[1], 0
    return value, 0.0, False, False, {}, 0


def _is_info(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" not in value


def _messages(value: Any) -> str | list[Message]:
    if isinstance(value, str):
        _check_bytes(_num_bytes(value))
        return value
    messages = [value] if isinstance(value, Mapping) else value
    if isinstance(messages, bytes) or not isinstance(messages, Sequence):
        raise ObservationError(refused("messages", value, f"a text or a list of messages, not {type(value).__name__}"))
    checked = [_message(each, index) for index, each in enumerate(messages)]
    _check_bytes(sum(map(_num_bytes, checked)))
    num_bytes = sum(num_picture_bytes(each.get("content")) for each in checked)
    if num_bytes > MAX_PICTURE_BYTES:
        raise ObservationError(
            f"messages hold pictures of {num_bytes} bytes: {MAX_PICTURE_BYTES} are the most allowed."
        )
    return checked


def _message(message: Any, index: int) -> Message:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ObservationError(refused(name, message, 'a dict such as {"role": "user", "content": "..."}'))
    content = message.get("content", "")
    if content is not None and not isinstance(content, str | list | tuple):
        raise ObservationError(refused(f'{name}["content"]', content, f"a text, not {type(content).__name__}"))
    if not isinstance(content, list | tuple):
        return dict(message)
    try:
        return {**message, "content": as_picture_bytes(content, f'{name}["content"]')}
    except RequestError as problem:
        raise ObservationError(str(problem)) from problem


def _num_bytes(value: Any, depth: int = 0) -> int:
    """Bytes of all text in a message."""
    if isinstance(value, str):
        if value.isascii():
            return len(value)
        try:
            return len(value.encode())
        except UnicodeEncodeError:
            raise ObservationError(refused("messages", value, "Unicode text; this holds half a pair")) from None
    if depth == _MAX_DEPTH:
        raise ObservationError(f"messages are nested deeper than {_MAX_DEPTH} levels.")
    if isinstance(value, Mapping):
        return sum(_num_bytes(key, depth + 1) + _num_bytes(item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_num_bytes(item, depth + 1) for item in value)
    return 0


def _check_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise ObservationError(f"messages hold {num_bytes} bytes of text: {MAX_TEXT_BYTES} are the most allowed.")


def _rewards(reward: Any, num_seats: int, seat: int | None) -> dict[int, float]:
    if isinstance(reward, Mapping):
        return {_seat("reward", each, num_seats): _number(number) for each, number in reward.items()}
    number = _number(reward)
    if seat is not None:
        return {seat: number}
    if number and num_seats > 1:
        hint = "Nobody has acted yet, so say whose it is."
        raise ObservationError(refused("reward", reward, "a dict {seat: reward} at the reset", hint))
    return {0: number} if number else {}


def _number(value: Any) -> float:
    if type(value) is float and is_reward(value):
        return value
    try:
        read = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        number = float(read) if isinstance(read, numbers.Real) else math.nan
    except (ValueError, TypeError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ObservationError(refused("reward", value, f"a finite number, or a dict of them, not {_kind(value)}"))
    if not is_reward(number):
        raise ObservationError(refused("reward", value, "finite in float32, the dtype of a batch's rewards"))
    return number


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, float) else type(value).__name__


def _flag(name: str, value: Any) -> bool:
    if type(value) is bool:
        return value
    read = value.item() if getattr(value, "size", None) == 1 else value  # numpy.bool
    if type(read) is not bool:
        raise ObservationError(refused(name, value, f"True or False, not {type(value).__name__}"))
    return read


def _seat(name: str, value: Any, num_seats: int) -> int:
    try:
        seat = operator.index(value)
    except TypeError:
        seat = -1
    if not 0 <= seat < num_seats:
        hint = "" if num_seats > 1 else "An environment of several says so by its attribute `num_seats`."
        raise ObservationError(refused(f"{name}: seat", value, f"a seat from 0 to {num_seats - 1}", hint))
    return seat


def _info(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ObservationError(refused("info", value, f"a dict, not {type(value).__name__}"))
    return dict(value)
