"""Errors of adapters in the words of the HTTP routes, where the engine's own name its Python API."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rollout_engine.base.errors import LifecycleError, RequestError

_UNLOAD = "POST /v1/unload_lora_adapter"
_WORDS = {
    "remove_lora first where numbers begin anew": 'give a higher revision, or "load_inplace": true for the next one; '
    f"{_UNLOAD} first where numbers begin anew",
    "Remove one, wait for its requests, or make the engine with more.": f"Remove one ({_UNLOAD}), wait for its "
    "requests, or start the server with a larger max_loras.",
    "Make the engine with max_lora_rank": "Start the server with max_lora_rank",
    "the directory of an adapter, or None": "the directory of an adapter",
}
"""Advice of the engine -> the same for a client."""
_VERB = re.compile(r"^(add_lora|remove_lora|pin_lora): ")


@contextmanager
def by_route_names(fields: Mapping[str, str]) -> Iterator[None]:
    """Re-raise the errors of a block with a route's own names. `fields`: of a `LoRARequest` -> of the route."""
    try:
        yield
    except RequestError as problem:
        field, dot, key = problem.field.partition(".")
        name = fields.get(field, field) + dot + key
        text = _reworded(str(problem))
        if text.startswith(problem.field):
            text = name + text.removeprefix(problem.field)
        raise RequestError(text, field=name, value=problem.value, bound=problem.bound) from problem
    except LifecycleError as problem:
        raise type(problem)(_reworded(str(problem))) from problem


def _reworded(text: str) -> str:
    text = _VERB.sub("", text)
    for said, meant in _WORDS.items():
        text = text.replace(said, meant)
    return text
