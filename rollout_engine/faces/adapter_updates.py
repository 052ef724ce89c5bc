"""Sends the adapter of a trainer's `PeftModel` alone: the implementation of `update_weights(model, merge=False)`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rollout_engine.base.errors import ManifestMismatchError, RequestError, WeightUpdateError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.engine.client import EngineClient
from rollout_engine.engine.verbs import VERBS
from sync.lazy_tensor import gather_whole, is_sharded


def update_adapter(client: EngineClient, source: Any, version: Any, options: UpdateOptions) -> UpdateReport:
    """Send the active LoRA of a `PeftModel` as a policy version. Raises `WeightUpdateError`."""
    defaults = UpdateOptions()
    for name in ("mode", "staging", "transport", "partial", "draft", "reset_version", "allow_nonfinite"):
        if getattr(options, name) != getattr(defaults, name):
            what = f"update_weights: {name}={getattr(options, name)!r} does not go with merge=False"
            raise WeightUpdateError(f"{what}, which sends an adapter: leave it out, or merge.")
    try:
        verb = VERBS["update_lora"]
        given = {"version": version, "kv": options.kv, "timeout": options.timeout}
        arguments = verb.bind((adapter_of(source),), given)
        report: UpdateReport = client.call(verb.name, arguments).wait(verb, arguments)
        return report
    except RequestError as problem:
        raise ManifestMismatchError(f"update_weights: {problem}") from problem


def adapter_of(model: Any) -> LoRARequest:
    """Return the active adapter of a `PeftModel`, by the names of its tensors and its configuration."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(model, nn.Module) or not isinstance(configs, Mapping):
        what = f"merge=False sends the adapter of a PeftModel, not a {type(model).__name__}"
        raise ManifestMismatchError(f"update_weights: {what}. Leave merge out to send whole weights.")
    active = getattr(model, "active_adapters", None) or [getattr(model, "active_adapter", None)]
    names = [active] if isinstance(active, str) else list(active() if callable(active) else active)
    if len(names) != 1 or names[0] not in configs:
        what = f"merge=False sends one active adapter, and the model has {names}"
        raise ManifestMismatchError(f"update_weights: {what}: model.set_adapter(NAME) activates one.")
    [name] = names
    tensors: dict[str, Tensor] = {}
    for full_name, tensor in model.state_dict().items():
        parts = full_name.split(".")
        if name in parts and any(part.startswith(("lora_", "modules_to_save")) for part in parts):
            whole = gather_whole(tensor) if is_sharded(tensor) else tensor
            tensors[_stored_name(full_name, name)] = whole.detach().cpu()
    return LoRARequest(name, tensors=tensors, config=configs[name])


def _stored_name(full_name: str, adapter: str) -> str:
    """A tensor's name as peft stores it: without the adapter's."""
    parts = full_name.split(".")
    parts.remove(adapter)
    return ".".join(parts)
