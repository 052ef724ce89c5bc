"""LoRA matrices of the linears of a causal LM, many adapters by name; `exact.enable` computes the active one.

The layers have the attributes of the package peft's, which need not be installed.
"""

import secrets
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rollout_engine import exact
from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_training import LoraShape

ALPHA = 32.0
"""`lora_alpha` of every adapter: its product is scaled by ALPHA / rank, as in "LoRA Without Regret" (Schulman 2025)."""
_OF_MLPS = ("mlp", "ffn", "feed_forward", "expert", "moe")
"""Parts of the paths of linears that are no attention or other mixer."""


class LoraLinear(nn.Module):
    """Computes base(x) + scaling * B(A(x)) for each active adapter that it has."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B, self.lora_dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.active_adapters: list[str] = []
        self.merged = self.disable_adapters = False

    @property
    def weight(self) -> Tensor:
        """That of the base: modules read its dtype."""
        weight: Tensor = self.base_layer.weight
        return weight

    def add(self, name: str, rank: int, generator: torch.Generator) -> None:
        """Add an adapter in float32 that changes nothing yet: A is uniform in ±in_features ** -0.5, and B is zero."""
        base = self.base_layer
        a, b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            bound = base.in_features**-0.5
            a.weight.uniform_(-bound, bound, generator=generator)
            b.weight.zero_()
        self.lora_A[name], self.lora_B[name], self.scaling[name] = a, b, ALPHA / rank

    def remove(self, name: str) -> None:
        """Free an adapter."""
        if name in self.scaling:
            del self.lora_A[name], self.lora_B[name], self.scaling[name]

    def forward(self, x: Tensor) -> Tensor:
        """The result of an exact layer differs: `exact.enable` replaces this if one adapter is active."""
        out: Tensor = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.scaling:
                added = self.lora_B[name](self.lora_A[name](x.float())) * self.scaling[name]
                out = out + added.to(out.dtype)
        return out


class LoraLayers:
    """All adapters of one exact model, whose own parameters are frozen."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: a causal LM that `exact.load` has loaded."""
        self._model = model.requires_grad_(False)
        self._layers: dict[str, LoraLinear] = {}
        """By the path of the linear."""

    def linears_of(self, shape: LoraShape) -> list[str]:
        """Paths of the linears of an adapter. Raises `RequestError` if there are none."""
        decoder = set(self._model.get_decoder().modules())  # type: ignore[operator]
        found = [
            path
            for path, child in self._model.named_modules()
            if isinstance(child, nn.Linear) and child in decoder and ".lora_" not in path
        ]
        paths = [path.removesuffix(".base_layer") for path in found]
        is_mlp = {path: any(part in path for part in _OF_MLPS) for path in paths}
        chosen = [path for path in paths if (shape.train_mlp if is_mlp[path] else shape.train_attn)]
        if not chosen:
            bound = "a choice of layers that the model has: train_mlp or train_attn"
            raise RequestError.for_field("lora_config", f"{shape}", bound)
        return chosen

    def add(self, name: str, shape: LoraShape) -> dict[str, nn.Parameter]:
        """Add an adapter; returns its parameters by the names that PEFT stores."""
        seed = secrets.randbits(63) if shape.seed is None else shape.seed
        generator = torch.Generator().manual_seed(seed)
        for path in self.linears_of(shape):
            if path not in self._layers:
                owner, _, last = path.rpartition(".")
                parent = self._model.get_submodule(owner)
                linear = parent.get_submodule(last)
                assert isinstance(linear, nn.Linear), "linears_of found it"
                self._layers[path] = LoraLinear(linear)
                setattr(parent, last, self._layers[path])
            self._layers[path].add(name, shape.rank, generator)
        exact.enable(self._model)  # the layers that are new
        return dict(self._parameters(name))

    def remove(self, name: str) -> None:
        """Free an adapter."""
        for layer in self._layers.values():
            layer.remove(name)

    def activate(self, name: str) -> None:
        """Have this adapter alone be computed."""
        for layer in self._layers.values():
            layer.active_adapters = [name]

    def _parameters(self, name: str) -> Iterable[tuple[str, nn.Parameter]]:
        for path, layer in self._layers.items():
            if name in layer.scaling:
                for matrix, held in (("A", layer.lora_A), ("B", layer.lora_B)):
                    parameter = held[name].weight
                    assert isinstance(parameter, nn.Parameter), "it is that of a linear"
                    yield f"base_model.model.{path}.lora_{matrix}.weight", parameter
