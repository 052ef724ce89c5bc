"""Draws on the host, from a copy of their logits, for rows of logits processors, grammars and budgets of thinking."""

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.kernels.token_logprobs import row_temperatures
from rollout_engine.kernels.triton.sampling import score
from rollout_engine.model.cuda.draws import Draws
from rollout_engine.model.sampling.logit_rows import LogitRows, row_pieces
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch


def draw_rows(out: ModelRunnerOutput, draws: Draws, logits: LogitRows, vocab_size: int) -> None:
    """Draw the rows `draws.on_host` of `logits` and overwrite their results in `out`, unless these stand.

    They do if a grammar allows them, or nothing edits the row after all. The host has all tokens before them.

    Tempered log-probs are computed by the same kernel as a trainer's.
    """
    allowed = _find_allowed(out, draws)
    edited = [row for row, each in draws.on_host.items() if each.are_active and row not in allowed]
    rows = np.array(edited, np.int64)
    for piece in row_pieces(len(rows), vocab_size, torch.device("cpu")):
        _draw_piece(out, draws, logits, rows[piece])


def _find_allowed(out: ModelRunnerOutput, draws: Draws) -> set[int]:
    """Rows whose tokens, as the device has drawn them, are those that `sample` would return."""
    masked = RowEdits(draws.on_host).masked
    if masked is None:
        return set()
    tokens = np.array(out.token_ids, np.int64)
    tokens[[*out.errors, *draws.batch.truncates.nonzero()[0]]] = -1
    _, is_refused = masked.masks(tokens[masked.rows])
    return set(masked.rows[~is_refused].tolist()) - masked.failures().keys()


def _draw_piece(out: ModelRunnerOutput, draws: Draws, source: LogitRows, rows: np.ndarray) -> None:
    batch = draws.batch.at(draws.columns.positions).rows(rows)
    logits = source.take(torch.from_numpy(rows))
    edits = RowEdits({place: draws.on_host[row] for place, row in enumerate(rows.tolist())})
    found = sample(logits.cpu(), batch, edits, torch.tensor(out.token_ids)[rows])
    _fill_tempered(found, logits, batch)
    for place, row in enumerate(rows.tolist()):
        out.token_ids[row] = found.token_ids[place]
        for ours, theirs in ((out.logprobs, found.logprobs), (out.kept_logprob_mass, found.kept_logprob_mass)):
            if ours is not None and theirs is not None:
                ours[row] = theirs[place]
        out.errors.pop(row, None)
        if place in found.errors:
            out.errors[row] = found.errors[place]
    if out.top_logprobs is not None and found.top_logprobs is not None:
        for column, part in zip(out.top_logprobs, found.top_logprobs, strict=True):
            column[rows, : part.shape[1]] = part
    if out.sampled_ranks is not None and found.sampled_ranks is not None:
        out.sampled_ranks[rows] = found.sampled_ranks


def _fill_tempered(out: ModelRunnerOutput, logits: Tensor, batch: SamplingBatch) -> None:
    if out.logprobs is None:
        return
    given = torch.from_numpy(batch.temperature).to(logits.device)
    tokens = torch.tensor(out.token_ids, device=logits.device).clamp(min=0)
    logprobs = score(logits, row_temperatures(given, logits), tokens).logprobs.tolist()
    for row, is_other in enumerate((batch.is_raw | batch.is_processed).tolist()):
        if not is_other and row not in out.errors:
            out.logprobs[row] = logprobs[row]
