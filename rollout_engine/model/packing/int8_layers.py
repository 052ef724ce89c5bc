"""Layers that multiply by weights rounded to int8 codes (`kernels.cpu.int8`).

The weights that the engine was given are kept in addition to the codes: digests and updates are those of the given
ones. Embeddings, heads, norms, biases and the matrix from latents to keys and values are not rounded.
"""

from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.head_groups import HeadGroup
from rollout_engine.model.packing.linear_groups import linear_groups


def round_layers(module: PreTrainedModel) -> None:
    """Make the linears of the layers, after `make_row_invariant`, multiply by int8 codes. Call `prove` after it.

    Raises `ConfigError` if that is not possible.
    """
    if any(hasattr(child, "_groups") for child in module.modules()):
        raise ConfigError(
            f"quantization='int8' is not possible: {type(module).__name__} is a mixture of experts, whose experts and "
            "routers are not rounded. Leave it out."
        )
    dtype = next(module.parameters()).dtype
    if not gemm.supports(dtype):
        raise ConfigError(
            f"quantization='int8' needs the C++ kernels for {dtype}: they multiply in float32 and bfloat16, where they "
            "could be built. Install g++, give dtype='float32' or 'bfloat16', or leave it out."
        )
    for group in linear_groups(module.base_model):
        group.as_int8 = not isinstance(group, HeadGroup)
