"""Makes every row of a loaded module independent of its batch, and proves it on this machine."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.linear import NotInvariant
from rollout_engine.kernels.paged_attention import prove_row_invariance
from rollout_engine.model.cpu.row_invariance import make_row_invariant, unproven_parts
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.passed_layers import AbsentHead
from rollout_engine.model.packing.int8_layers import round_layers
from rollout_engine.model.packing.linear_groups import linear_groups
from rollout_engine.model.packing.output_head import set_float32_head
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.wiring import connect


def make_deterministic(
    module: PreTrainedModel,
    geometry: Sequence[LayerGeometry],
    *,
    fp32_head: bool = False,
    as_int8: bool = False,
    cut: ModelCut | None = None,
) -> str | None:
    """Make `module` row-invariant, in place; returns why rows may still depend on their batch, or None.

    `fp32_head`: see `output_head`. `as_int8`: see `int8_layers`. `cut`: how it is cut over ranks, which all call this
    together.

    Raises `ConfigError` if this CPU does not allow it.
    """
    dtype = next(module.parameters()).dtype
    try:
        attending = [layer for layer in geometry if layer.attends]
        prove_row_invariance({dim for layer in attending for dim in (layer.head_dim_k, layer.head_dim_v)}, dtype)
        make_row_invariant(module)
        if cut is not None:
            connect(module, cut)
        set_float32_head(module, fp32_head and not isinstance(module.get_output_embeddings(), AbsentHead))
        if as_int8:
            round_layers(module)
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
