"""Runs a stage's layers once as modules before it serves: a module whose forward needs all of its layers fails here."""

import numpy as np

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.cpu.model import CpuModel


def try_stage(model: CpuModel) -> None:
    """Compute a token by the modules of a stage, into a block and a slot that nothing has yet.

    Raises `ConfigError` if they do not run without the layers of other stages, or have other routers than the whole.
    """
    stage = model.stage
    assert stage is not None, "a model that is not divided needs no trial"
    batch = FlatBatch.of([SequenceChunk([0], 0, [0])])
    if not model.kv.states.is_empty:
        batch = batch._replace(states=StateChunks.in_place([1], np.zeros(1, np.int64), [0]))
    decoder, model.decoder = model.decoder, None
    try:
        model.forward_states(batch, [0], [])
    except BrokenTurnsError:  # another rank has failed
        raise
    except Exception as problem:  # foreign modules may fail in any way
        raise _make_refusal(model, f"{type(problem).__name__}: {problem}") from problem
    finally:
        model.decoder = decoder
    if stage.routing is not None and len(model.routers) != stage.num_own_routers:
        raise _make_refusal(model, f"{len(model.routers)} of its {stage.num_own_routers} routers are found")


def _make_refusal(model: CpuModel, reason: str) -> ConfigError:
    what, name = "cannot be divided into stages: its layers do not run apart", type(model.module).__name__
    return ConfigError(f"pipeline_parallel_size: {name} {what} ({reason}). Leave it out, or give tensor_parallel_size.")
