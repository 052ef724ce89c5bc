"""Turns one `SchedulerOutput` into tokens: the flat batch through the model, then the sampler.

Every live sequence's tokens are kept here, so that a step carries only what changed.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rollout_engine.messages import ModelRunnerOutput, NewSequence, SchedulerOutput
from rollout_engine.model.attention import SequenceChunk
from rollout_engine.model.forward import PagedModel
from rollout_engine.model.logit_edits import LogitEdits
from rollout_engine.model.logits_processors import LogitsProcessor
from rollout_engine.model.sampler import SamplingBatch, sample


class ModelRunner:
    """The model, its KV pool, and the sequences they work on."""

    def __init__(self, model: PagedModel, *, vocab_size: int, processors: Sequence[LogitsProcessor] = ()) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._processors = processors
        self._sequences: dict[str, NewSequence] = {}
        self._edits: dict[str, LogitEdits] = {}
        """Of the sequences that have any."""

    @property
    def num_sequences(self) -> int:
        """Sequences whose state is held; 0 when idle."""
        return len(self._sequences)

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and draw one token per sample task."""
        for request_id in work.finished:
            self._sequences.pop(request_id, None)
            self._edits.pop(request_id, None)
        self._learn(work.new)
        self.model.kv.copy_blocks(work.block_copies)
        chunks = [self._chunk(s.request_id, s.num_computed_tokens, s.num_tokens, s.block_ids) for s in work.scheduled]
        if not chunks:
            return ModelRunnerOutput(token_ids=[], logprobs=None)
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1
        rows = list(dict.fromkeys(int(ends[task.row]) for task in work.samples))
        logits = self.model.forward(chunks, rows)
        if not rows:
            return ModelRunnerOutput(token_ids=[], logprobs=None)
        if len(rows) < len(work.samples):  # the n samples of a prompt draw from the same row
            index = {row: i for i, row in enumerate(rows)}
            logits = logits[torch.tensor([index[int(ends[task.row])] for task in work.samples])]
        return self._sample(logits, [self._sequences[task.request_id] for task in work.samples])

    def _learn(self, sequences: Sequence[NewSequence]) -> None:
        for new in sequences:
            self._sequences[new.request_id] = new
            edits = LogitEdits.of(new, self._processors, self._vocab_size)
            if edits is not None:
                self._edits[new.request_id] = edits

    def _chunk(self, request_id: str, start: int, count: int, block_ids: list[int]) -> SequenceChunk:
        return SequenceChunk(self._sequences[request_id].token_ids[start : start + count], start, block_ids)

    def _sample(self, logits: torch.Tensor, sequences: list[NewSequence]) -> ModelRunnerOutput:
        batch = SamplingBatch.from_tasks(
            [s.params for s in sequences],
            seeds=[s.seed for s in sequences],
            positions=[len(s.token_ids) for s in sequences],
        )
        known = ((row, self._edits.get(s.request_id)) for row, s in enumerate(sequences)) if self._edits else ()
        out = sample(logits, batch, {row: edits for row, edits in known if edits is not None and edits.active})
        for sequence, token in zip(sequences, out.token_ids, strict=True):
            sequence.token_ids.append(token)
        return out
