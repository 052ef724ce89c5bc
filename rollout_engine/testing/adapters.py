"""Random LoRA adapters in the format of the package peft, which need not be installed."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout_engine.base.lora_request import LoRARequest

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def random_adapter(
    model: nn.Module,
    name: str = "adapter",
    *,
    seed: int = 0,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = (),
    std: float = 0.2,
    revision: int = 0,
) -> LoRARequest:
    """An adapter of the linear layers of `model`, without its head, or of those whose last names are `targets`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, child in model.named_modules():
        last = path.rpartition(".")[2]
        if isinstance(child, nn.Linear) and last != "lm_head" and (not targets or last in targets):
            for matrix, shape in (("A", (rank, child.in_features)), ("B", (child.out_features, rank))):
                values = torch.randn(shape, generator=generator) * std
                tensors[f"base_model.model.{path}.lora_{matrix}.weight"] = values
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
    return LoRARequest(name, tensors=tensors, revision=revision, config=config)


def save_adapter(directory: str | Path, adapter: LoRARequest, **config: Any) -> LoRARequest:
    """Write an adapter's tensors and configuration, with these entries changed, as peft's `save_pretrained` does."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    assert adapter.tensors is not None, "it has its values in memory"
    header, data = {}, b""
    for name, tensor in adapter.tensors.items():
        start, data = len(data), data + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, len(data)],
        }
    encoded = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    (path / "adapter_config.json").write_text(json.dumps({**adapter.config, **config}))
    return LoRARequest(adapter.name, path=str(path), revision=adapter.revision)


def merge_adapter(model: nn.Module, adapter: LoRARequest) -> nn.Module:
    """Add an adapter to the weights of `model`, in place: W + alpha / r * B A."""
    tensors, config = adapter.tensors or {}, adapter.config
    with torch.no_grad():
        for path, child in model.named_modules():
            a, b = (tensors.get(f"base_model.model.{path}.lora_{matrix}.weight") for matrix in "AB")
            if isinstance(child, nn.Linear) and a is not None and b is not None:
                child.weight += (b @ a * (config["lora_alpha"] / config["r"])).to(child.weight.dtype)
    return model
