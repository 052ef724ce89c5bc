"""Whether a module's layers may run by our kernels: both ways over a few batches, and the logits compared."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rollout_engine.kernels.triton.paged_attention import Batch, Limits
from rollout_engine.model.decoder import NotOurs
from rollout_engine.model.device.model import DeviceModel
from rollout_engine.model.device.pool import DeviceBatch
from rollout_engine.model.geometry import LayerGeometry

_BLOCK_SIZE = 16
_NUM_BLOCKS = 4
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Root mean square of the difference, as a share of that of the logits."""


def obstacle(
    module: nn.Module, geometry: Sequence[LayerGeometry], *, is_ordered: bool, num_processors: int | None = None
) -> str | None:
    """Why the layers of `module` must run as modules; None where they need not. Weights must be loaded.

    The arithmetic is another, so no bit is compared: a factor, a norm or a rotation that differs moves logits by more.
    """
    limits = Limits(num_tokens=64, num_sequences=4, context=_NUM_BLOCKS * _BLOCK_SIZE)

    def model(fused: bool) -> DeviceModel:
        return DeviceModel(
            module,
            geometry,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            limits=limits,
            fused=fused,
            is_ordered=is_ordered and fused,
            num_processors=num_processors,
        )

    try:
        ours, theirs = model(True), model(False)
        for batch in _batches(module.config.get_text_config().vocab_size, ours.device):
            rows = torch.arange(len(batch.token_ids), device=ours.device)
            difference = _difference(ours.forward(batch, rows), theirs.forward(batch, rows))
            if not difference <= _TOLERANCES[next(module.parameters()).dtype]:
                return f"its logits differ from its modules' by {difference:.2g} of their size"
    except NotOurs as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever a foreign module does that is not built as its parts suggest
        return f"it fails on its parts ({type(problem).__name__}: {problem})"
    return None


def _batches(vocab_size: int, device: torch.device) -> Iterator[DeviceBatch]:
    """Two prompts; then one of them decodes and the other goes on."""
    tokens = (torch.arange(64, device=device) * 7919 + 13) % vocab_size
    tables = torch.tensor([[0, 1, 0, 0], [2, 3, 0, 0]], dtype=torch.int32, device=device)
    for sizes, first in (((17, 3), (0, 0)), ((1, 4), (17, 3))):
        positions = torch.cat([torch.arange(f, f + n, device=device) for f, n in zip(first, sizes, strict=True)])
        rows = torch.arange(2, device=device).repeat_interleave(torch.tensor(sizes, device=device))
        slots = tables[rows, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
        starts = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32, device=device)
        lens = torch.tensor([f + n for f, n in zip(first, sizes, strict=True)], dtype=torch.int32, device=device)
        attention = Batch(starts, lens, tables, num_decodes=int(sizes[0] == 1))
        yield DeviceBatch(tokens[: sum(sizes)], positions, slots, attention)
        tokens = tokens[sum(sizes) :]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
