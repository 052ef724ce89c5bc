"""Turn a loaded module into one whose every row is the same bits, and prove it on this machine."""

from collections.abc import Sequence

from torch import nn

from rollout_engine.errors import ConfigError
from rollout_engine.kernels.linear import NotInvariant
from rollout_engine.kernels.paged_attention import prove_row_invariance
from rollout_engine.model.fusion import linear_groups
from rollout_engine.model.geometry import LayerGeometry
from rollout_engine.model.output_head import set_float32_head
from rollout_engine.model.row_invariance import make_row_invariant, unproven_parts


def make_deterministic(module: nn.Module, geometry: Sequence[LayerGeometry], *, fp32_head: bool = False) -> str | None:
    """Swap in row-invariant linears, norms and activations, in place; returns why that does not suffice, or None.

    `fp32_head`: see `output_head`. Raises `ConfigError` where this CPU does not allow it.
    """
    dtype = next(module.parameters()).dtype
    try:
        prove_row_invariance({dim for layer in geometry for dim in (layer.head_dim_k, layer.head_dim_v)}, dtype)
        make_row_invariant(module)
        set_float32_head(module, fp32_head)
        for group in linear_groups(module):
            group.prove()
    except NotInvariant as problem:
        raise ConfigError(f"deterministic=True is not possible here: {problem}. Use deterministic=False.") from None
    unproven = unproven_parts(module)
    if not unproven:
        return None
    return (
        f"{type(module).__name__} has {len(unproven)} parts whose rows may depend on the batch, such as {unproven[0]}"
    )
