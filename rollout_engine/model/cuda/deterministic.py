"""Deterministic layers of models that the fused decoder does not run: the modules of an exact trainer, over paged KV.

Their parts are replaced as on a trainer, one trial proves the operations that are left, and another that the engine's
chunks over its pool give the bits of the trainer's whole sequences. They run more slowly than fused layers, without
CUDA graphs and adapters.
"""

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.cuda.decoder_trial import Reason, trainer_difference
from rollout_engine.model.cuda.row_invariance import ARITHMETIC
from rollout_engine.model.modules.loaded_model import LoadedModel


def make_modules_exact(loaded: LoadedModel, reason: Reason, *, block_size: int) -> None:
    """Replace the parts of `loaded`'s module, whose layers cannot be fused for this `reason`, in place.

    Raises `ConfigError` if they could have been fused but failed, if they are cut over ranks, or if a row may depend
    on its batch.
    """
    module = loaded.module
    if reason.is_failure:
        raise _error(reason.text)
    if loaded.cut is not None:
        raise _error(f"{reason.text}, and ranks on devices compute fused layers alone exactly")
    module.set_attn_implementation(ARITHMETIC.attention_name)
    ARITHMETIC.make_row_invariant(module)
    if unproven := ARITHMETIC.unproven_parts(module):
        kind, count = type(module).__name__, len(unproven)
        raise _error(
            f"{reason.text}, and {kind} has {count} parts whose rows may depend on the batch, such as {unproven[0]}"
        )
    if (problem := trainer_difference(module, loaded.geometry, block_size=block_size)) is not None:
        raise _error(problem)


def _error(reason: str) -> ConfigError:
    return ConfigError(f"deterministic=True is not possible on a device: {reason}. Use deterministic=False.")
