"""Values of users, such as columns and `info`, as JSON."""

import math
from collections.abc import Mapping
from typing import Any

from rollout_engine.base.errors import text_of
from rollout_engine.base.pictures import Picture

_MAX_DEPTH = 64
_MAX_BITS = 10_000
"""Bits of a number that Python writes and reads in decimal; beyond 4,300 digits it refuses."""
_KEYS = (str, int, type(None))
"""Types of keys that JSON writes as texts itself."""


def json_value(value: Any, depth: int = 0) -> Any:
    """The value with everything that JSON lacks written another way; a part nested deeper than 64 levels is a text.

    Sets become sorted lists, arrays and tensors lists, pictures their digests, anything else (NaN, infinities, bytes,
    dates) its `str`.
    """
    if isinstance(value, Picture):
        return value.digest.hex()
    if isinstance(value, int):
        return value if value.bit_length() < _MAX_BITS else hex(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == _MAX_DEPTH:
        return text_of(value)
    if isinstance(value, Mapping):
        items = value.items()
        return {key if isinstance(key, _KEYS) else text_of(key): json_value(item, depth + 1) for key, item in items}
    if isinstance(value, list | tuple):
        return [json_value(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_value(item, depth + 1) for item in value), key=repr)
    try:
        listed = value.tolist()
    except Exception:  # no array, or one without values
        return text_of(value)
    return json_value(listed, depth + 1)
