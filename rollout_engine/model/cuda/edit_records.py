"""Records on the device of the logit edits of sequences, made when a sequence is first drawn from, or resumed."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.sampling_params import penalties_of
from rollout_engine.kernels.triton.logit_edits import ALWAYS, record
from rollout_engine.model.cuda.upload import upload
from rollout_engine.model.sampling.logit_edits import LogitEdits


class EditRecords:
    """Keeps one record per sequence, by sequence id."""

    def __init__(self, vocab_size: int, context: int, device: torch.device) -> None:
        """`context`: most tokens of a sequence."""
        self._vocab_size, self._context, self._device = vocab_size, context, device
        self._records: dict[int, Tensor] = {}

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop the records of these sequences; unknown ids are a no-op."""
        for sequence_id in sequence_ids:
            self._records.pop(sequence_id, None)

    def addresses(self, edits: Iterable[LogitEdits]) -> np.ndarray:
        """Device addresses of the records, int64 [len(edits)]."""
        return np.array([self._record(each).data_ptr() for each in edits], np.int64)

    def _record(self, edits: LogitEdits) -> Tensor:
        sequence_id = edits.sequence.sequence_id
        if sequence_id not in self._records:
            (self._records[sequence_id],) = upload([record_of(edits, self._vocab_size, self._context)], self._device)
        return self._records[sequence_id]


def record_of(edits: LogitEdits, vocab_size: int, context: int) -> np.ndarray:
    """The record of `edits`, int32. The host must have all tokens of the sequence."""
    sequence, params, seen, max_seen = edits.sequence, edits.sequence.params, None, 0
    token_ids, num_prompt = sequence.token_ids, sequence.num_prompt_tokens
    if edits.counts is not None:
        edits.counts.follow(token_ids)
        seen = edits.counts.ids, edits.counts.counts
        max_seen = min(vocab_size, len(seen[0]) + max(0, context - len(token_ids)) + 1)
    masked = [(token, num_prompt + params.min_tokens) for token in edits.stop_ids if params.min_tokens]
    masked += [(word[0], ALWAYS) for word in sequence.bad_words if len(word) == 1]
    return record(
        token_ids,
        num_prompt,
        penalties=penalties_of(params),
        seen=seen,
        max_seen=max_seen,
        biases=edits.bias,
        masked=masked,
        words=[word for word in sequence.bad_words if len(word) > 1],
        allowed=edits.allowed,
        vocab_size=vocab_size,
    )
