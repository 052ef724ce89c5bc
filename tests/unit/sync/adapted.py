"""Layers with adapters as the package peft builds them: the same attributes, names and arithmetic.

The package itself is used where it is installed (`test_adapters.py`).
"""

import torch
from torch import nn


class LoraLinear(nn.Module):
    """Computes base(x) + scaling * B(A(x))."""

    def __init__(self, base, rank=2, scaling=0.5, adapters=("default",)):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False) for name in adapters})
        self.scaling = scaling
        self.active_adapters, self.merged_adapters, self.disable_adapters = ["default"], [], False

    @property
    def merged(self):
        return bool(self.merged_adapters)

    def get_base_layer(self):
        return self.base_layer

    def delta(self, name):
        return self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling

    def merge(self):
        for name in self.active_adapters:
            if name not in self.merged_adapters:
                self.base_layer.weight.data += self.delta(name)
                self.merged_adapters.append(name)

    def unmerge(self):
        while self.merged_adapters:
            self.base_layer.weight.data -= self.delta(self.merged_adapters.pop())


class TrainedCopy(nn.Module):
    """A module and a copy of it that is trained in its place."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module
        copy = type(module)(*module.weight.shape)
        self.modules_to_save = nn.ModuleDict({"default": copy})
        self.active_adapters, self.disable_adapters = ["default"], False


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tuner(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


class AdaptedModel(nn.Module):
    """As a PeftModel: `base_model.model` is the model, some of its layers replaced."""

    def __init__(self):
        super().__init__()
        inner = Inner()
        inner.layers[1] = LoraLinear(inner.layers[1], adapters=("default", "other"))
        inner.embed = TrainedCopy(inner.embed)
        self.base_model = Tuner(inner)
        self.peft_config = {"default": object()}

    @property
    def layer(self):
        return self.base_model.model.layers[1]

    def forward(self, ids):
        return self.base_model.model(ids)


def build(seed=0):
    torch.manual_seed(seed)
    return AdaptedModel()


def merged(model, adapters=("default",)):
    """Plain name -> values, by other words than those of the product."""
    layers, embed = model.base_model.model.layers, model.base_model.model.embed
    weight = layers[1].base_layer.weight.detach().clone()
    for name in adapters:
        weight += (layers[1].lora_B[name].weight @ layers[1].lora_A[name].weight * layers[1].scaling).detach()
    return {
        "embed.weight": embed.modules_to_save["default"].weight,
        "layers.0.weight": layers[0].weight,
        "layers.0.bias": layers[0].bias,
        "layers.1.weight": weight,
        "layers.1.bias": layers[1].base_layer.bias,
        "head.weight": model.base_model.model.head.weight,
    }
