"""The routed experts of a step's tokens, on a device: kept with their KV, and returned with the tokens drawn.

Every step of a mixture keeps them (`CudaKVPool.routed`): its routers write a byte or two for each choice, in the kernel
that chooses. They are shared and copied with the KV: by samples of the same prompt, by a next turn. Requests that ask
get the choices kept at the slots of their tokens, which the host has before the step is launched.
"""

from collections.abc import Callable

import numpy as np

from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.model.cuda.attention import CudaKVPool
from rollout_engine.model.cuda.upload import Download, upload
from rollout_engine.model.sequences.routed_requests import RoutedRequests

Fill = Callable[[ModelRunnerOutput], None]
"""Fills routed experts in, once the step's result has arrived."""


class RoutingRecorder:
    """Returns the routed experts that the pool keeps, for the sequences that ask."""

    def __init__(self, pool: CudaKVPool) -> None:
        self._pool, self._requests = pool, RoutedRequests()

    def update(self, work: SchedulerOutput) -> None:
        """Drop finished sequences and add new ones."""
        self._requests.update(work)

    def are_asked_for(self, work: SchedulerOutput) -> bool:
        """Whether a sequence of the step asks."""
        return self._requests.are_in(work)

    def fetch(self, work: SchedulerOutput, drawn: np.ndarray, blocks_of: Callable[[int], np.ndarray]) -> Fill:
        """Start to copy the experts of tokens to the host, behind the step `work`, which was launched last.

        Those of all tokens but the last of the prompts that it completes are returned too.

        Args:
            work: the step.
            drawn: int64 [n], KV slots of the tokens behind which it draws.
            blocks_of: the KV blocks of a sequence by its id, int32.
        """
        prompts = {
            index: self._slots(blocks_of(work.scheduled[index].sequence_id), num_tokens - 1)
            for index, num_tokens in self._requests.list_completed(work)
        }
        kept = self._pool.routed_rows
        (slots,) = upload([np.concatenate([drawn, *prompts.values()])], kept.device)
        copied, sizes = Download(kept[slots]), [len(drawn), *map(len, prompts.values())]

        def fill(out: ModelRunnerOutput) -> None:
            out.routed_experts, *of_prompts = np.split(copied.wait().numpy(), np.cumsum(sizes)[:-1])
            out.prompt_routed_experts = dict(zip(prompts, of_prompts, strict=True))

        return fill

    def _slots(self, blocks: np.ndarray, num_tokens: int) -> np.ndarray:
        """KV slots of the first tokens of a sequence, int64."""
        positions, size = np.arange(num_tokens), self._pool.block_size
        return blocks[positions // size].astype(np.int64) * size + positions % size
