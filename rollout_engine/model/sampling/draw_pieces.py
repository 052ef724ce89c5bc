"""Draws on the host over pieces of a step's rows, with the result of a draw over all of them at once."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.model.sampling.entropies import fill_entropies
from rollout_engine.model.sampling.logit_rows import LogitRows, row_pieces
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampler import sample
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

_CPU = torch.device("cpu")


def sample_rows(logits: LogitRows, batch: SamplingBatch, edits: RowEdits, vocab_size: int) -> ModelRunnerOutput:
    """Draw a token from each of the first N rows; `batch` has N rows, `edits` some of them."""
    pieces = row_pieces(len(batch.positions), vocab_size, _CPU)
    if len(pieces) == 1:
        return _sample_piece(logits.take(pieces[0]), batch, edits)
    found = []
    for piece in pieces:
        inside = RowEdits({row - piece.start: each for row, each in edits.items() if piece.start <= row < piece.stop})
        found.append(_sample_piece(logits.take(piece), batch.rows(np.arange(piece.start, piece.stop)), inside))
    return joined(found)


def _sample_piece(logits: Tensor, batch: SamplingBatch, edits: RowEdits) -> ModelRunnerOutput:
    out = sample(logits, batch, edits)
    fill_entropies(out, logits, batch)
    return out


def joined(parts: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
    """One output of all parts, in order. Rows of parts without a column that others have get its empty value."""
    sizes = [len(part.token_ids) for part in parts]
    starts = np.cumsum([0, *sizes]).tolist()
    out = ModelRunnerOutput(
        token_ids=list(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=_column((part.logprobs for part in parts), sizes),
        kept_logprob_mass=_column((part.kept_logprob_mass for part in parts), sizes),
    )
    for start, part in zip(starts, parts, strict=False):
        out.errors |= {start + row: message for row, message in part.errors.items()}
        out.id_logprobs |= {start + row: values for row, values in part.id_logprobs.items()}
        out.supports |= {start + row: ids for row, ids in part.supports.items()}
    width = max(0 if part.top_logprobs is None else part.top_logprobs[0].shape[1] for part in parts)
    if width:
        out.top_logprobs = np.full((starts[-1], width), -1, np.int32), np.full((starts[-1], width), -np.inf, np.float32)
    if any(part.sampled_ranks is not None for part in parts):
        out.sampled_ranks = np.zeros(starts[-1], np.int32)
    if any(part.entropies is not None for part in parts):
        out.entropies = np.zeros(starts[-1], np.float32)
    for start, size, part in zip(starts, sizes, parts, strict=False):
        if out.top_logprobs is not None and part.top_logprobs is not None:
            for whole, piece in zip(out.top_logprobs, part.top_logprobs, strict=True):
                whole[start : start + size, : piece.shape[1]] = piece
        if out.sampled_ranks is not None and part.sampled_ranks is not None:
            out.sampled_ranks[start : start + size] = part.sampled_ranks
        if out.entropies is not None and part.entropies is not None:
            out.entropies[start : start + size] = part.entropies
    return out


def _column(parts: Iterable[list[float] | None], sizes: list[int]) -> list[float] | None:
    """The column of all parts, zeros for those without it; None if none has it."""
    found = list(parts)
    if all(part is None for part in found):
        return None
    pairs = zip(found, sizes, strict=True)
    return list(chain.from_iterable([0.0] * size if part is None else part for part, size in pairs))
