"""Runs a step as large as any can be, to measure its memory."""

import numpy as np
import torch

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.triton.paged_attention import Batch
from rollout_engine.model.cuda.attention import CudaBatch
from rollout_engine.model.cuda.draws import CudaDraws, Draws, columns_of, special_columns
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.sampler import CudaSampler
from rollout_engine.model.cuda.upload import upload
from rollout_engine.model.sampling.logit_rows import row_pieces
from rollout_engine.model.sampling.sampling_batch import SamplingBatch


@torch.inference_mode()
def run_largest_step(model: CudaModel, vocab_size: int, num_drafted: int = 0) -> None:
    """Compute as many tokens as `model.limits` allow, and draw from each row of logits that is in the first piece.

    Logits are those of its sequences, and of `num_drafted` tokens of each. KV goes to block 0, and states are lost.
    """
    limits, device = model.limits, model.device
    num_sequences = min(limits.num_sequences, limits.num_tokens)
    num_drawn = min(limits.num_sequences * (1 + num_drafted), limits.num_tokens)
    bounds = np.linspace(0, limits.num_tokens, num_sequences + 1).astype(np.int32)
    starts = torch.from_numpy(bounds).to(device)
    tokens = torch.zeros(limits.num_tokens, dtype=torch.int64, device=device)
    max_blocks = -(-limits.context // model.kv.block_size)
    tables = torch.zeros(num_sequences, max_blocks, dtype=torch.int32, device=device)
    attention = Batch(starts, starts.diff(), tables, num_decodes=0)
    states = None if model.kv.states.is_empty else StateChunks.whole(np.diff(bounds).tolist())
    batch = CudaBatch(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), attention, states=states)
    rows = torch.arange(num_drawn, device=device) if num_drafted else starts[1:].long() - 1
    logits = model.forward_rows(batch, rows).take(row_pieces(num_drawn, vocab_size, device)[0])
    count = len(logits)
    params = [SamplingParams(top_p=0.9)] * count
    drawn = SamplingBatch.from_tasks(params, seeds=[0] * count, positions=[0] * count)
    columns, special = columns_of(drawn, np.arange(count)), special_columns(drawn, [], np.empty(0, np.int64))
    draws = Draws([], drawn, columns, special, on_host={})
    arrived = CudaDraws.of(draws, upload(draws.sent, device))
    CudaSampler(vocab_size, device).draw(logits, arrived, torch.empty(count, dtype=torch.int64, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
