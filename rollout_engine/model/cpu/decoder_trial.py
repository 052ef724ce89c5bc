"""Decides whether a module's layers may run as one C++ call: compares every bit with what modules compute."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.cpu.flat_batch import SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.decoder_structure import UnsupportedStructure
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.one_thread import one_thread
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.seat import ELSEWHERE

_BLOCK_SIZE = 16
_NUM_BLOCKS = 4
_FAR = 500


def unsupported_reason(module: nn.Module, geometry: Sequence[LayerGeometry], cut: ModelCut | None = None) -> str | None:
    """Why the layers of `module`, made row-invariant before, must run as modules; None where they need not.

    Runs two small steps each way, over a KV pool of its own. Weights must be loaded: zeros would prove nothing.
    `cut`: how the module is cut over ranks, which all call this together.
    """
    with one_thread():  # bits do not depend on the number of threads
        return _unsupported_reason(module, geometry, cut)


def _unsupported_reason(module: nn.Module, geometry: Sequence[LayerGeometry], cut: ModelCut | None) -> str | None:
    if not compiled.supports(next(module.parameters()).dtype):
        return "there is no compiled attention for it here"
    reason = _reason_of(lambda: _compiled_model(module, geometry, cut))
    if cut is not None and not cut.seat.all_agree(reason is None):  # ranks run together, or none does
        return reason or ELSEWHERE
    reason = reason or _reason_of(lambda: _compare(module, geometry, cut))
    if cut is not None and not cut.seat.all_agree(reason is None):
        return reason or ELSEWHERE
    return reason


def _reason_of(attempt: Callable[[], object]) -> str | None:
    """Why an attempt failed; None where it did not."""
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
    """What differs that should not."""


def _compiled_model(module: nn.Module, geometry: Sequence[LayerGeometry], cut: ModelCut | None) -> CpuModel:
    return CpuModel(module, geometry, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, compiled=True, cut=cut)


def _compare(module: nn.Module, geometry: Sequence[LayerGeometry], cut: ModelCut | None) -> None:
    """Raise `_Disagreement` where the compiled decoder gives other bits than modules."""
    ours = _compiled_model(module, geometry, cut)
    theirs = CpuModel(module, geometry, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE)
    for chunks in _batches(module, geometry):
        rows = [sum(len(chunk.token_ids) for chunk in chunks[: i + 1]) - 1 for i in range(len(chunks))]
        pairs = zip(_computed(ours, chunks, rows), _computed(theirs, chunks, rows), strict=True)
        if not all(_same_bits(*pair) for pair in pairs):
            raise _Disagreement("its logits or hidden states differ from its modules'")
    if not all(map(_same_bits, ours.kv.tensors(), theirs.kv.tensors())):
        raise _Disagreement("its keys and values differ from its modules'")


def _computed(model: CpuModel, chunks: list[SequenceChunk], rows: list[int]) -> tuple[Tensor, Tensor]:
    """(logits, hidden states) of these rows."""
    logits, states = model.forward_states(chunks, rows, rows)
    return logits.take(slice(None)), states


def _batches(module: nn.Module, geometry: Sequence[LayerGeometry]) -> Iterator[list[SequenceChunk]]:
    """Two prompts; then one decodes, the other goes on, and a third sequence is beyond every window.

    The context of the third one is the first prompt's block, repeated.
    """
    config = module.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (64,), generator=generator).tolist()
    yield [SequenceChunk(tokens[:21], 0, [0, 1]), SequenceChunk(tokens[21:26], 0, [2])]
    windows = [layer.sliding_window for layer in geometry if layer.sliding_window]
    limit = getattr(config, "max_position_embeddings", None) or _FAR
    far = min(max([_FAR, *(window + _FAR for window in windows)]), max(0, limit - _BLOCK_SIZE)) // _BLOCK_SIZE
    yield [
        SequenceChunk(tokens[26:27], 21, [0, 1]),
        SequenceChunk(tokens[27:35], 5, [2]),
        SequenceChunk(tokens[35:38], far * _BLOCK_SIZE, [0] * far + [3]),
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
