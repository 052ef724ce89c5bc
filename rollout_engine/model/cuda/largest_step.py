"""Runs a step as large as any can be, to measure its memory and time."""

import numpy as np
import torch

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.kernels.triton.paged_attention import Batch
from rollout_engine.model.cuda.attention import CudaBatch
from rollout_engine.model.cuda.draws import CudaDraws, Draws, columns_of, special_columns
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.sampler import CudaSampler
from rollout_engine.model.cuda.upload import upload
from rollout_engine.model.sampling.logit_rows import LogitRows, row_pieces
from rollout_engine.model.sampling.sampling_batch import SamplingBatch


@torch.inference_mode()
def forward_largest_step(model: CudaModel, num_drafted: int = 0) -> LogitRows:
    """Compute as many tokens as `model.limits` allow; logits of its sequences, and of `num_drafted` tokens of each.

    KV goes to block 0.
    """
    limits, device = model.limits, model.device
    count = min(limits.num_sequences, limits.num_tokens)
    bounds = np.linspace(0, limits.num_tokens, count + 1).astype(np.int32)
    starts = torch.from_numpy(bounds).to(device)
    tokens = torch.zeros(limits.num_tokens, dtype=torch.int64, device=device)
    max_blocks = -(-limits.context // model.kv.block_size)
    tables = torch.zeros(count, max_blocks, dtype=torch.int32, device=device)
    attention = Batch(starts, starts.diff(), tables, num_decodes=0)
    batch = CudaBatch(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), attention)
    if num_drafted:
        return model.forward_rows(batch, torch.arange(_num_drawn(model, num_drafted), device=device))
    return model.forward_rows(batch, starts[1:].long() - 1)


@torch.inference_mode()
def run_largest_step(model: CudaModel, vocab_size: int, num_drafted: int = 0) -> None:
    """`forward_largest_step`, and a draw from each row of logits that is in the first piece."""
    device = model.device
    piece = row_pieces(_num_drawn(model, num_drafted), vocab_size, device)[0]
    logits = forward_largest_step(model, num_drafted).take(piece)
    count = len(logits)
    params = [SamplingParams(top_p=0.9)] * count
    drawn = SamplingBatch.from_tasks(params, seeds=[0] * count, positions=[0] * count)
    columns, special = columns_of(drawn, np.arange(count)), special_columns(drawn, [], np.empty(0, np.int64))
    draws = Draws([], drawn, columns, special, on_host={})
    arrived = CudaDraws.of(draws, upload(draws.sent, device))
    CudaSampler(vocab_size, device).draw(logits, arrived, torch.empty(count, dtype=torch.int64, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _num_drawn(model: CudaModel, num_drafted: int) -> int:
    """The most rows that tokens are drawn from in a step."""
    return min(model.limits.num_sequences * (1 + num_drafted), model.limits.num_tokens)
