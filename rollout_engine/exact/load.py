"""`load`: a trainer's model with the weights of an engine of the same checkpoint, to the bit."""

import os

import torch
from transformers import PreTrainedModel

from rollout_engine.base.config import read_dtype
from rollout_engine.base.errors import ConfigError
from rollout_engine.exact.enabling import enable
from rollout_engine.model.loading.loader import load_trainable

_DTYPES = ("auto", "float32", "bfloat16")


def load(
    path: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    *,
    device: torch.device | str = "cpu",
    fp32_head: bool | None = None,
) -> PreTrainedModel:
    """The causal LM of a checkpoint as an engine loads it, enabled (`enable`), in eval mode and with gradients.

    Of a composite, such as one with vision, it is the whole if pictures are computed exactly, else its text model.

    The checkpoint may be quantised: its weights are dequantised in float32 and rounded once to `dtype`, as an engine
    does, so the model that trains is the dequantised one. `save_pretrained` writes it unquantised.

    Args:
        path: a directory, or an id of the Hugging Face hub.
        dtype: float32 or bfloat16, of torch or by a name that `EngineConfig(dtype=...)` takes. None, or "auto": the
            one that an engine chooses on `device`.
        device: the one on which the model is to stay.
        fp32_head: as for `enable`.

    Raises `ConfigError` for a checkpoint that an engine refuses, and a model that cannot be exact.
    """
    name = "auto" if dtype is None else read_dtype(dtype)
    if name not in _DTYPES:
        bound = 'float32 or bfloat16 (of torch, or their names), "auto" or None'
        raise ConfigError(f"exact.load: dtype={dtype!r} is not allowed: must be {bound}.")
    model = load_trainable(os.fspath(path), name, torch.device(device))
    enable(model, fp32_head=fp32_head)
    return model
