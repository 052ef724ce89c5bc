"""Whether a module's layers may run as one C++ call: both ways over a few batches, and every bit compared."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rollout_engine.kernels.cpu import attention as compiled
from rollout_engine.model.attention import SequenceChunk
from rollout_engine.model.decoder import NotOurs
from rollout_engine.model.forward import PagedModel
from rollout_engine.model.geometry import LayerGeometry

_BLOCK_SIZE = 16
_NUM_BLOCKS = 4
_FAR = 500


def obstacle(module: nn.Module, geometry: Sequence[LayerGeometry]) -> str | None:
    """Why the layers of `module`, made row-invariant before, must run as modules; None where they need not.

    Costs two small steps each way, over a KV pool of its own, on one thread: bits do not depend on their number, and on
    a busy machine threads wait for one another. Weights must be loaded: of zeros nothing is learnt.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _obstacle(module, geometry)
    finally:
        torch.set_num_threads(threads)


def _obstacle(module: nn.Module, geometry: Sequence[LayerGeometry]) -> str | None:
    if not compiled.serves(next(module.parameters()).dtype):
        return "there is no compiled attention for it here"
    try:
        ours = PagedModel(module, geometry, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, compiled=True)
        theirs = PagedModel(module, geometry, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE)
        for chunks in _batches(module, geometry):
            rows = [sum(len(chunk.token_ids) for chunk in chunks[: i + 1]) - 1 for i in range(len(chunks))]
            if not _same_bits(ours.forward(chunks, rows), theirs.forward(chunks, rows)):
                return "its logits differ from its modules'"
    except NotOurs as reason:
        return str(reason)
    except Exception as problem:  # whatever a foreign module does that is not built as its parts suggest
        return f"it fails on its parts ({type(problem).__name__}: {problem})"
    if not all(map(_same_bits, ours.kv.tensors(), theirs.kv.tensors())):
        return "its keys and values differ from its modules'"
    return None


def _batches(module: nn.Module, geometry: Sequence[LayerGeometry]) -> Iterator[list[SequenceChunk]]:
    """Two prompts; then one of them decodes, the other goes on, and a third is far on, beyond every window.

    What the far one looks back on is the first prompt's blocks, over and over.
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
