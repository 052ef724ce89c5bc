"""LoRA layers with the attributes and arithmetic of the package peft, which need not be installed."""

import torch
from torch import nn

from rollout_engine import LoRARequest
from rollout_engine.model.pictures.tower_forward import picture_parts


class LoraLinear(nn.Module):
    """Computes base(x) + scaling * B(A(dropout(x)))."""

    def __init__(self, base, rank, alpha, dropout=0.0, name="default"):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({name: nn.Dropout(dropout) if dropout else nn.Identity()})
        self.scaling, self.lora_variant = {name: alpha / rank}, {}
        self.active_adapters, self.merged, self.disable_adapters = [name], False, False

    def forward(self, x):
        out = self.base_layer(x)
        if self.disable_adapters:
            return out
        for name in self.active_adapters:
            wide = x.to(self.lora_A[name].weight.dtype)
            out = out + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](wide))) * self.scaling[name]
        return out.to(x.dtype)


class PeftModel(nn.Module):
    """A causal LM some of whose linears are adapted, as peft wraps one."""

    def __init__(self, model, targets=("q_proj", "v_proj", "down_proj"), rank=8, alpha=16, name="default", **options):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.peft_config = {name: {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}}
        self.active_adapter = name
        for parent in list(model.modules()):
            for last, child in list(parent.named_children()):
                if last in targets and isinstance(child, nn.Linear):
                    adapted = LoraLinear(child, rank, alpha, name=self.active_adapter, **options)
                    for matrix in (*adapted.lora_A.values(), *adapted.lora_B.values()):
                        nn.init.normal_(matrix.weight, std=0.2)
                    setattr(parent, last, adapted)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in path)

    def get_base_model(self):
        return self.base_model.model

    def forward(self, *args, **kwargs):
        return self.base_model.model(*args, **kwargs)

    def adapters(self):
        return [child for child in self.modules() if isinstance(child, LoraLinear)]

    def request(self, name="x", revision=0):
        """The adapter as `get_peft_model_state_dict` gives it."""
        tensors = {
            key.replace(f".{self.active_adapter}.weight", ".weight"): value
            for key, value in self.state_dict().items()
            if "lora_" in key
        }
        return LoRARequest(name, tensors=tensors, config=self.peft_config[self.active_adapter], revision=revision)


def tower_linears(model):
    """Last names of the linears of a composite's vision tower and projector."""
    linears = {id(each) for part in picture_parts(model) for each in part.modules() if isinstance(each, nn.Linear)}
    return {path.rpartition(".")[2] for path, child in model.named_modules() if id(child) in linears}


def dense(model, ids):
    """Logits of a model for ids [B, T], without gradients."""
    with torch.no_grad():
        return model(input_ids=ids).logits
