"""Decides whether a module's layers may run as one C++ call: compares every bit with the results of modules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.geometry import LayerGeometry, keeps_states
from rollout_engine.model.modules.one_thread import one_thread
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.modules.structure_checks import UnsupportedStructure
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.seat import ELSEWHERE

_BLOCK_SIZE = 16
_NUM_BLOCKS = 4
_NUM_PAIRS = 8
"""Pairs of tokens at far positions in a step."""
_NUM_SLOTS = 2 * _NUM_PAIRS
_FAR = 500
_END = 1 << 16
"""Trials stay below this position, so that their rotary tables are small: layers read no position but by these."""


def unsupported_reason(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], cut: ModelCut | None = None
) -> str | None:
    """Why the layers of `module`, made row-invariant before, must run as modules; None if they need not.

    Runs a few small steps each way, over a KV pool of its own. Weights must be loaded: zeros would prove nothing.
    `cut`: how the module is cut over ranks, which all call this together; of a stage its own layers are tried.
    """
    with one_thread():  # bits do not depend on the number of threads
        return _unsupported_reason(module, geometry, cut)


def _unsupported_reason(module: PreTrainedModel, geometry: Sequence[LayerGeometry], cut: ModelCut | None) -> str | None:
    if cut is not None and cut.group is not None:
        return "its experts are divided over engines"
    if not compiled.supports(next(module.parameters()).dtype):
        return "there is no compiled attention for it here"
    if keeps_states(geometry) and cut is not None and cut.is_tensor_parallel:
        return "some of its layers keep states"
    reason = _reason_of(lambda: _compiled_model(module, geometry, cut))
    if cut is not None and not cut.seat.all_agree(reason is None):  # ranks run together, or none does
        return reason or ELSEWHERE
    reason = reason or _reason_of(lambda: _compare(module, geometry, cut))
    if cut is not None and not cut.seat.all_agree(reason is None):
        return reason or ELSEWHERE
    return reason


def _reason_of(attempt: Callable[[], object]) -> str | None:
    """Why an attempt failed; None if it did not."""
    try:
        attempt()
    except (UnsupportedStructure, _Disagreement) as problem:
        return str(problem)
    except BrokenTurnsError:  # another rank has failed
        raise
    except Exception as problem:  # foreign modules may fail in any way
        return f"the compiled decoder fails on its parts ({type(problem).__name__}: {problem})"
    return None


class _Disagreement(Exception):
    """Results that should be equal differ; the message names them."""


def _compiled_model(module: PreTrainedModel, geometry: Sequence[LayerGeometry], cut: ModelCut | None) -> CpuModel:
    return _model(module, geometry, compiled=True, cut=cut)


def _model(module: PreTrainedModel, geometry: Sequence[LayerGeometry], **options: Any) -> CpuModel:
    options |= dict(num_blocks=_NUM_BLOCKS + _NUM_PAIRS, block_size=_BLOCK_SIZE)
    return CpuModel(module, geometry, **options, num_state_slots=_NUM_SLOTS if keeps_states(geometry) else 0)


def _compare(module: PreTrainedModel, geometry: Sequence[LayerGeometry], cut: ModelCut | None) -> None:
    """Raise `_Disagreement` if the compiled decoder gives other bits than modules."""
    ours = _compiled_model(module, geometry, cut)
    theirs = _model(module, geometry, cut=cut)
    for batch in _with_slots(_batches(module, geometry), geometry):
        rows = (batch.columns.token_starts[1:] - 1).tolist()
        pairs = zip(_computed(ours, batch, rows), _computed(theirs, batch, rows), strict=True)
        if not all(_same_bits(*pair) for pair in pairs):
            raise _Disagreement("its logits or hidden states differ from its modules'")
    if not all(map(_same_bits, ours.kv.tensors(), theirs.kv.tensors())):
        raise _Disagreement("its keys and values differ from its modules'")
    if not all(map(_same_bits, ours.kv.states.tensors(), theirs.kv.states.tensors())):
        raise _Disagreement("its states differ from its modules'")


def _with_slots(batches: Iterator[FlatBatch], geometry: Sequence[LayerGeometry]) -> Iterator[FlatBatch]:
    """The batches; if layers keep states, chunks write them behind their first token, as for a draft, and their last.

    A chunk reads the last slot that the chunk of the same number has written in the batch before, if it is its
    continuation.
    """
    written = np.zeros(0, np.int64)
    for batch in batches:
        if not keeps_states(geometry):
            yield batch
            continue
        starts = batch.columns.token_starts
        sources = np.full(len(starts) - 1, -1)
        if batch.shifts is None:
            sources[: len(written)] = written
        ends = [sorted({first + 1, end}) for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        counts = np.cumsum([0, *map(len, ends)])
        slots = np.setdiff1d(np.arange(_NUM_SLOTS), sources)[: counts[-1]]
        flat = np.array([end for each in ends for end in each], np.int64)
        yield batch._replace(states=StateChunks(starts, sources, counts, flat, slots))
        written = slots[counts[1:] - 1]


def _computed(model: CpuModel, batch: FlatBatch, rows: list[int]) -> tuple[Tensor, Tensor]:
    """(logits, hidden states) of these rows."""
    logits, states = model.forward_states(batch, rows, rows)
    return logits.take(slice(None)), states


def _batches(module: PreTrainedModel, geometry: Sequence[LayerGeometry]) -> Iterator[FlatBatch]:
    """Two prompts; then one decodes, the other continues, and a third sequence is beyond every window.

    The context of the third one is the first prompt's block, repeated. At last pairs of tokens, each on both sides of a
    boundary that the configuration may name.
    """
    config = module.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (64,), generator=generator).tolist()
    yield FlatBatch.of([SequenceChunk(tokens[:21], 0, [0, 1]), SequenceChunk(tokens[21:26], 0, [2])])
    windows = [layer.sliding_window for layer in geometry if layer.sliding_window]
    limit = getattr(config, "max_position_embeddings", None) or _FAR
    far = min(max([_FAR, *(window + _FAR for window in windows)]), max(0, limit - _BLOCK_SIZE)) // _BLOCK_SIZE
    yield FlatBatch.of(
        [
            SequenceChunk(tokens[26:27], 21, [0, 1]),
            SequenceChunk(tokens[27:35], 5, [2]),
            SequenceChunk(tokens[35:38], far * _BLOCK_SIZE, [0] * far + [3]),
        ]
    )
    starts = far_starts(config, 2, end=_END)
    for first in range(0, len(starts), _NUM_PAIRS):
        some = starts[first : first + _NUM_PAIRS]
        yield FlatBatch.of([SequenceChunk(tokens[38:40], 0, [_NUM_BLOCKS + i]) for i in range(len(some))], some)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
