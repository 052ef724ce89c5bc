"""The requests of a simulated run, and their results."""

import random
from collections.abc import Iterator, Sequence
from typing import overload

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.capacity.lengths import LengthSampler
from rollout_engine.capacity.options import WorkloadTable

_SHARED_TOKEN, _FIRST_TOKEN, _NUM_TOKENS = 3, 4, 250
_PLACES = (1, 250, 250**2, 250**3)
"""Place values of a prompt's number, one token each."""


class SimulatedPrompt(Sequence[int]):
    """A prompt's tokens, made when they are read: those that all prompts share, then its number's digits, repeated."""

    __slots__ = ("_length", "_number", "_num_shared")

    def __init__(self, number: int, length: int, num_shared: int) -> None:
        self._number, self._length, self._num_shared = number, length, num_shared

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._token(position) for position in range(*index.indices(self._length))]
        return self._token(range(self._length)[index])

    def _token(self, position: int) -> int:
        if position < self._num_shared:
            return _SHARED_TOKEN
        return _FIRST_TOKEN + self._number // _PLACES[position % len(_PLACES)] % _NUM_TOKENS


class Job:
    """One request: its lengths, and the times of its events. Times are seconds of the simulation."""

    __slots__ = ("batch", "ended_at", "first_token_at", "lengths", "num_left", "oldest", "prompt", "submitted_at")

    def __init__(self, batch: int, prompt: int, lengths: list[int]) -> None:
        self.batch, self.prompt = batch, prompt
        self.lengths = lengths
        """Tokens that each sample will have."""
        self.num_left = len(lengths)
        """Samples that have not ended."""
        self.oldest = [-1] * len(lengths)
        """Version of each sample's first token."""
        self.submitted_at = 0.0
        self.first_token_at = self.ended_at = -1.0


class Workload:
    """All jobs of a run, in the order in which they are submitted. A job's sequences have consecutive ids."""

    def __init__(self, table: WorkloadTable, block_size: int, seed: int) -> None:
        self.table = table
        self.num_samples = table.samples_together
        """Sequences of each job."""
        self.jobs: list[Job] = []
        self.batches: list[list[int]] = []
        """The jobs of each batch, by number."""
        self.prompt_lengths: list[int] = []
        """Tokens of each prompt, by number."""
        self.num_shared_tokens = table.shared_prefix_tokens // block_size * block_size if block_size else 0
        """Full blocks that all prompts share."""
        self._params = SamplingParams(n=self.num_samples, logprobs=0)
        self._max_tokens = table.output_tokens.most
        self._draw(random.Random(mix(seed, 1)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sum(job.lengths) for job in self.jobs)

    @property
    def num_sequences(self) -> int:
        """Samples of all jobs."""
        return len(self.jobs) * self.num_samples

    def find(self, sequence_id: int) -> tuple[Job, int]:
        """A sequence's job, and its index there."""
        number, index = divmod(sequence_id, self.num_samples)
        return self.jobs[number], index

    def request(self, number: int) -> EngineCoreRequest:
        """The messages that a front end sends for a job."""
        job = self.jobs[number]
        length = self.prompt_lengths[job.prompt]
        return EngineCoreRequest(
            prompt_token_ids=SimulatedPrompt(job.prompt, length, self.table.shared_prefix_tokens),  # type: ignore[arg-type]
            params=self._params,
            max_tokens=self._max_tokens,
            seed=number,
            first_sequence_id=number * self.num_samples,
        )

    def arrivals(self, seed: int) -> Iterator[tuple[float, list[int]]]:
        """(time, jobs) for prompts that arrive independently."""
        times, now = random.Random(mix(seed, 2)), 0.0
        per_prompt = self.table.samples_per_prompt // self.num_samples
        for first in range(0, len(self.jobs), per_prompt):
            now += times.expovariate(self.table.requests_per_second)
            yield now, list(range(first, first + per_prompt))

    def _draw(self, source: random.Random) -> None:
        table = self.table
        prompts = LengthSampler(table.prompt_tokens, source)
        outputs = LengthSampler(table.output_tokens, source, table.sample_correlation)
        for batch in range(table.num_batches):
            first = len(self.jobs)
            for _ in range(table.prompts_per_batch):
                lengths = outputs.draw_group(table.samples_per_prompt)
                for start in range(0, len(lengths), self.num_samples):
                    number = len(self.prompt_lengths)
                    self.jobs.append(Job(batch, number, lengths[start : start + self.num_samples]))
                self.prompt_lengths.append(prompts.draw())
            self.batches.append(list(range(first, len(self.jobs))))
