"""POST /load_lora_adapter_from_tensors: an adapter whose tensors come with the request."""

from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.adapter_problems import by_route_names
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.sglang.weights import tensors_of
from rollout_engine.serve.vllm.control import revision_of

PEERS: dict[str, tuple[Any, ...]] = {"added_tokens_config": ({},)}
"""Fields of SGLang's that are not served -> the values that ask for nothing."""
IGNORED = frozenset(("lora_id",))
"""Fields that change nothing."""


class LoadTensorsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    lora_name: str
    config_dict: dict[str, Any]
    """Content of adapter_config.json."""
    serialized_tensors: str
    """Base64 of a safetensors file: tensors by the names that PEFT gives them."""
    load_format: str | None = None
    pinned: bool = False
    """It never gives way to other adapters."""
    load_inplace: bool = False
    """Other values under a known name: without a revision, the next one."""
    revision: int | None = None


async def load_lora_from_tensors(served: Served, asked: Asked) -> Reply:
    """Add an adapter from the bytes of a safetensors file in base64. Pickles are refused."""
    body: LoadTensorsBody = asked.body
    if body.load_format not in (None, "", "safetensors"):
        raise RequestError.for_field("load_format", body.load_format, "'safetensors', or left out")
    revision = await revision_of(served, body.lora_name, body.revision, load_inplace=body.load_inplace)
    pairs = await run_in_thread(tensors_of, body.serialized_tensors, "serialized_tensors")
    with by_route_names({"name": "lora_name", "tensors": "serialized_tensors", "config": "config_dict"}):
        request = LoRARequest(body.lora_name, tensors=dict(pairs), revision=revision, config=body.config_dict)
        info = await served.engine.add_lora(request)
        if body.pinned:
            info = await served.engine.pin_lora(body.lora_name)
    loaded = {each.name: each.name for each in await served.engine.list_loras()}
    message = f"LoRA adapter '{info.name}' is served."
    return Reply({"success": True, "message": message, "loaded_adapters": loaded, "adapter": info})
