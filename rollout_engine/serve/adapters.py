"""Routes of LoRA adapters, with the engine's errors in the words of the routes: its own name its Python API."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.weights import tensors_of

PEERS: dict[str, tuple[Any, ...]] = {"added_tokens_config": ({},)}
"""Fields of SGLang's that are not served -> the values that ask for nothing."""
IGNORED = frozenset(("lora_id",))
"""Fields that change nothing."""
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


async def load_lora(
    served: Served,
    asked: Asked,
    *,
    lora_name: str,
    lora_path: str,
    load_inplace: bool = False,
    revision: int | None = None,
    base_model_name: str | None = None,
) -> Reply:
    """Add an adapter from a directory of this machine, in PEFT's format."""
    served.check_model(base_model_name)
    revision = await _revision_of(served, lora_name, revision, load_inplace=load_inplace)
    with _by_route_names({"name": "lora_name", "path": "lora_path"}):
        info = await served.engine.add_lora(LoRARequest(lora_name, lora_path, revision=revision))
    return Reply({"success": True, "message": f"LoRA adapter '{info.name}' is served.", "adapter": info})


async def load_lora_from_tensors(
    served: Served,
    asked: Asked,
    *,
    lora_name: str,
    config_dict: dict[str, Any],
    serialized_tensors: str,
    load_format: str | None = None,
    pinned: bool = False,
    load_inplace: bool = False,
    revision: int | None = None,
) -> Reply:
    """Add an adapter from the bytes of a safetensors file in base64. Pickles are refused.

    `config_dict`: the content of adapter_config.json. `serialized_tensors`: tensors by the names that PEFT gives them.
    `pinned`: it never gives way to other adapters. `load_inplace`: other values under a known name.
    """
    if load_format not in (None, "", "safetensors"):
        raise RequestError.for_field("load_format", load_format, "'safetensors', or left out")
    revision = await _revision_of(served, lora_name, revision, load_inplace=load_inplace)
    pairs = await run_in_thread(tensors_of, serialized_tensors, "serialized_tensors")
    with _by_route_names({"name": "lora_name", "tensors": "serialized_tensors", "config": "config_dict"}):
        request = LoRARequest(lora_name, tensors=dict(pairs), revision=revision, config=config_dict)
        info = await served.engine.add_lora(request)
        if pinned:
            info = await served.engine.pin_lora(lora_name)
    loaded = {each.name: each.name for each in await served.engine.list_loras()}
    message = f"LoRA adapter '{info.name}' is served."
    return Reply({"success": True, "message": message, "loaded_adapters": loaded, "adapter": info})


async def unload_lora(served: Served, asked: Asked, *, lora_name: str, lora_int_id: int | None = None) -> Reply:
    """Remove an adapter."""
    name = lora_name
    if not name:
        raise RequestError.for_field("lora_name", name, "the name of an adapter that is loaded")
    with _by_route_names({}):
        is_removed = await served.engine.remove_lora(name)
    if not is_removed:
        names = ", ".join(f"'{adapter.name}'" for adapter in await served.engine.list_loras())
        known = f"this server has {names}" if names else "none is loaded"
        raise HttpProblem(404, f"There is no adapter '{name:.200}': {known}.", field="lora_name")
    return Reply({"success": True, "message": f"LoRA adapter '{name}' is removed."})


async def _revision_of(served: Served, name: str, revision: int | None, *, load_inplace: bool) -> int:
    """The revision of arriving values; with `load_inplace` and without one, the next. Raises `RequestError`."""
    if name in (served.model, "default"):
        raise RequestError.for_field("lora_name", name, "another name than the model's")
    if revision is not None:
        return revision
    known = [each.revision for each in await served.engine.list_loras() if each.name == name]
    return known[0] + 1 if known and load_inplace else 0


@contextmanager
def _by_route_names(fields: Mapping[str, str]) -> Iterator[None]:
    """Re-raise the errors of a block with a route's own names. `fields`: of a `LoRARequest` -> of the route."""
    try:
        yield
    except RequestError as problem:
        field, dot, key = problem.field.partition(".")
        name = fields.get(field, field) + dot + key
        text = _reword(str(problem))
        if text.startswith(problem.field):
            text = name + text.removeprefix(problem.field)
        raise RequestError(text, field=name, value=problem.value, bound=problem.bound) from problem
    except LifecycleError as problem:
        raise type(problem)(_reword(str(problem))) from problem


def _reword(text: str) -> str:
    text = _VERB.sub("", text)
    for said, meant in _WORDS.items():
        text = text.replace(said, meant)
    return text
