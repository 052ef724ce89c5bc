"""Log-probs of prompts, computed chunk by chunk from the logits of each step.

The logits at position p are for the token at p + 1: a chunk [start, end) of a prompt of P tokens gives the log-probs of
tokens start + 1 to min(end, P - 1). The scheduler bounds the rows of logits per step. A preempted sequence starts over,
unless it has sampled tokens: then its prompt log-probs have been returned.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import NewSequence, PromptLogprobs, ScheduledSequence
from rollout_engine.kernels.token_logprobs import RowStatsKernel, logprobs_at, row_blocks, row_stats, row_temperatures
from rollout_engine.kernels.truncation import most_likely
from rollout_engine.model.sampling.sampler import ranks_of

_DEVICE_BLOCK_NUMEL = 1 << 22
"""Logits that are ranked at a time on a device: ids of 64 bits for each of them may be held there."""
Fetch: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to copy a tensor to the host; returns a function that waits for the copy and returns it."""


class PromptScorer:
    """Scores and ranks the tokens of prompts as their chunks are computed."""

    def __init__(
        self,
        vocab_size: int,
        kernel: RowStatsKernel = row_stats,
        fetch: Fetch = lambda tensor: lambda: tensor,
    ) -> None:
        """`kernel` runs on the logits' device, and `fetch` copies its results from there."""
        self._vocab_size, self._kernel, self._fetch = vocab_size, kernel, fetch
        self._prompts: dict[int, _Prompt] = {}
        self._pieces: list[_Piece] = []

    def add(self, new: Sequence[NewSequence], scheduled: Sequence[ScheduledSequence]) -> None:
        """Score the prompts of `new` sequences that ask for it and start now; forks share their parent's log-probs."""
        asked = {each.sequence_id: each for each in new if each.params.prompt_logprobs is not None}
        for chunk in scheduled if asked else ():
            sequence = asked.get(chunk.sequence_id)
            if sequence is not None and len(sequence.token_ids) == sequence.num_prompt_tokens:
                self._prompts[chunk.sequence_id] = _Prompt(sequence, self._vocab_size)

    def forget(self, sequence_id: int) -> None:
        """Drop the prompt of a sequence. An unknown id is a no-op."""
        self._prompts.pop(sequence_id, None)

    def rows(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """Rows of this step's flat batch whose logits `score` needs."""
        rows: list[int] = []
        self._pieces, first_row = [], 0
        for index, chunk in enumerate(scheduled if self._prompts else ()):
            prompt = self._prompts.get(chunk.sequence_id)
            if prompt is not None:
                end = chunk.num_computed_tokens + chunk.num_scheduled_tokens
                piece = _Piece(index, prompt, chunk.num_computed_tokens, end)
                self._pieces.append(piece)
                rows += range(first_row, first_row + piece.size)
                if end == len(prompt.token_ids):
                    del self._prompts[chunk.sequence_id]
            first_row += chunk.num_scheduled_tokens
        return rows

    @property
    def has_pieces(self) -> bool:
        """Whether this step computes any part of a prompt to score."""
        return bool(self._pieces)

    def score(self, logits: Tensor) -> Callable[[], dict[int, PromptLogprobs]]:
        """Start to score the logits [n, V] of `rows`.

        Returns a function that waits for the results of this step and returns index into `scheduled` -> log-probs of
        prompts now complete. They are whole once the functions of all earlier steps have been called, too.
        """
        start, arriving = 0, list[_Arriving]()
        for piece in self._pieces:
            arriving += piece.score(logits[start : start + piece.size], self._kernel, self._fetch)
            start += piece.size
        complete = [piece for piece in self._pieces if piece.end == len(piece.prompt.token_ids)]

        def finish() -> dict[int, PromptLogprobs]:
            for place, wait in arriving:
                place[:] = wait().numpy()
            arriving.clear()
            return {piece.place: piece.prompt.found for piece in complete}

        return finish


_Arriving: TypeAlias = tuple[np.ndarray, Callable[[], Tensor]]
"""The host memory that figures are copied to, and a function that waits for them."""


class _Prompt:
    """One prompt and its log-probs so far."""

    def __init__(self, sequence: NewSequence, vocab_size: int) -> None:
        params, length = sequence.params, sequence.num_prompt_tokens
        self.token_ids = torch.tensor(sequence.token_ids)
        self.temperature = 1.0 if params.logprobs_mode == "raw" else params.temperature
        self.num_top = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs or 0
        shape = length, self.num_top
        self.ranks = np.zeros(length, np.int32)
        self.found = PromptLogprobs(
            logprobs=np.full(length, np.nan, np.float32),
            top_logprobs=(np.full(shape, -1, np.int32), np.full(shape, np.nan, np.float32)) if self.num_top else None,
            ranks=self.ranks,
        )


class _Piece(NamedTuple):
    """Positions [start, end) of a prompt, computed in this step."""

    place: int
    prompt: _Prompt
    start: int
    end: int

    @property
    def size(self) -> int:
        """Rows with a token to score: the prompt's last position has none."""
        return min(self.end, len(self.prompt.token_ids) - 1) - self.start

    def score(self, logits: Tensor, kernel: RowStatsKernel, fetch: Fetch) -> list[_Arriving]:
        if not len(logits):
            return []
        prompt, scored = self.prompt, slice(self.start + 1, self.start + 1 + self.size)
        temperatures = row_temperatures(prompt.temperature, logits)
        token_ids = _send_ids(prompt.token_ids[scored], logits.device)
        stats = kernel(logits, temperatures, token_ids)
        arriving = [(prompt.found.logprobs[scored], fetch(stats.logprobs))]
        ranks, *top = (column[scored] for column in (prompt.ranks, *(prompt.found.top_logprobs or ())))
        for block in row_blocks(logits, _DEVICE_BLOCK_NUMEL):
            arriving.append((ranks[block], fetch(ranks_of(logits[block], token_ids[block]))))
            if top:
                ids = most_likely(torch.nan_to_num(logits[block]), prompt.num_top)
                figure = (stats.maximum, temperatures, stats.log_total)
                logprobs = logprobs_at(logits[block].gather(-1, ids), *(column[block, None] for column in figure))
                arriving += [(top[0][block], fetch(ids.int())), (top[1][block], fetch(logprobs))]
        return arriving


def _send_ids(token_ids: Tensor, device: torch.device) -> Tensor:
    """`token_ids` of the host on `device`; nothing waits for the copy."""
    return token_ids if device.type == "cpu" else token_ids.pin_memory().to(device, non_blocking=True)
