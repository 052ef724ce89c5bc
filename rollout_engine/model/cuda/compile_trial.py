"""Decides whether a module's layers run compiled: checks them on the trial's batches, then times the largest step."""

import logging
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rollout_engine.kernels.triton.paged_attention import Limits
from rollout_engine.model.cuda.compiled_layers import CompiledLayers
from rollout_engine.model.cuda.decoder_trial import disagreement, served, small_model
from rollout_engine.model.cuda.largest_step import forward_largest_step
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.modules.geometry import LayerGeometry

logger = logging.getLogger("rollout_engine")

_SECONDS = 120.0
_BLOCK_SIZE = 16
_ROUNDS = 3


def compiled_layers(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], limits: Limits
) -> CompiledLayers | None:
    """Compiled layers of `module`, whose weights are loaded; None, and a log line, where modules are faster or safer.

    On return everything that later steps need is compiled, also the code for a single token.
    """
    started = time.perf_counter()
    try:
        compiled = CompiledLayers(module, len(geometry))
        with compiled.compiling(_SECONDS):
            ours, theirs = (served(small_model(module, geometry, fused=False, compiled=c)) for c in (compiled, None))
            if (problem := disagreement(ours, theirs)) is not None:
                raise ArithmeticError(problem)
            forward_largest_step(_model(module, geometry, Limits(1, 1, limits.context), compiled))
            ways = [_model(module, geometry, limits, each) for each in (compiled, None)]
            for model in ways:
                _seconds(model)
    except Exception as problem:  # the compiler, the allocator or the module may raise anything
        problem = getattr(problem, "inner_exception", problem)  # the cause that the compiler's error wraps
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        logger.warning("compile=True is not possible here, steps run as modules, more slowly: %s", reason)
        return None
    seconds = time.perf_counter() - started
    in_compiled, in_modules = _fastest(ways)
    timing = f"{limits.num_tokens} tokens in {in_compiled * 1e3:.1f} ms compiled, {in_modules * 1e3:.1f} ms as modules"
    chosen = compiled if in_compiled < in_modules else None
    kept = "compiled" if chosen is not None else "modules"
    logger.info("compile=True: %s; they run as %s. %d graphs in %.1f s.", timing, kept, compiled.num_graphs, seconds)
    return chosen


def _model(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], limits: Limits, compiled: CompiledLayers | None
) -> CudaModel:
    return CudaModel(
        module, geometry, num_blocks=1, block_size=_BLOCK_SIZE, limits=limits, fused=False, compiled=compiled
    )


def _fastest(ways: Sequence[CudaModel]) -> list[float]:
    """The shortest time of the largest step for each model, in seconds; models take turns."""
    rounds = [[_seconds(model) for model in ways] for _ in range(_ROUNDS)]
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def _seconds(model: CudaModel) -> float:
    started = time.perf_counter()
    forward_largest_step(model)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started
