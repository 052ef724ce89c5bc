"""A worker whose model is a formula: every token tells the context, the weights and the KV that made it.

The runner is `FakeExecutor`, over blocks that it writes and reads; the weights are real tensors under the real
transaction, in two pieces, so that a step that meets half an update spells neither version.
"""

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.base.seeds import mix
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.engine.client import EngineInfo
from rollout_engine.execution.extensions import Extensions, ExtensionTable
from rollout_engine.model.cpu.shadow_memory import CpuShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.transaction import WeightUpdater
from rollout_engine.weights.update_session import UpdateSession
from worker_ext.base import WorkerExtension, rpc, rpc_beside_steps
from worker_ext.weights import WeightSyncExtension

VOCAB_SIZE = 251
NAMES = ("first", "last")
FORGOTTEN = -1


def weights_of(version: int) -> dict[str, Tensor]:
    """The tensors of a version."""
    return {name: torch.full((4,), version, dtype=torch.int64) for name in NAMES}


def spelled_token(context: int, seed: int, first: int, last: int, kv_version: int) -> int:
    """The token after a context (its digest), by weights that were `first` as the step began and `last` as it ended,
    over KV of which the oldest is `kv_version`'s."""
    return mix(mix(mix(context, seed), first), mix(last, kv_version)) % VOCAB_SIZE


class Notes(WorkerExtension):
    """Methods that leave a note, take their time, or raise; `notes` are those of the whole run."""

    @rpc
    def note(self, number: int) -> int:
        """Leave a note."""
        return self.worker.notes.add("began", number)

    @rpc
    def note_slowly(self, number: int, seconds: float) -> int:
        """Leave a note, and take some time."""
        self.worker.notes.add("began", number)
        self.worker.sleep(seconds)
        return number

    @rpc_beside_steps
    def note_beside(self, number: int, seconds: float) -> int:
        """Leave a note beside the steps."""
        return self.note_slowly(number, seconds)

    @rpc
    def stumble(self, number: int) -> int:
        """Raise."""
        self.worker.notes.add("began", number)
        raise KeyError(f"user code fails at {number}")


class NoteBook:
    """What extensions were called with, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, _: str, number: int) -> int:
        """Write a number down."""
        self.numbers.append(number)
        return number


TABLE = ExtensionTable([Notes, WeightSyncExtension])
_EMPTY = nn.Module()


class SpellingRunner(FakeExecutor):
    """Computes steps. `reach(point)` may raise; it and `rest` let other tasks run: a step takes time."""

    num_sequences = property(lambda self: len(self.sequences))

    def __init__(
        self,
        block_size: int,
        num_state_slots: int,
        live: Mapping[str, Tensor],
        reach: Callable[[str], Any],
        rest: Callable[[], None],
    ) -> None:
        super().__init__(block_size=block_size, vocab_size=VOCAB_SIZE, num_state_slots=num_state_slots)
        self._live, self._reach, self._rest, self._first = live, reach, rest, 0
        self.model = SimpleNamespace(kv=SimpleNamespace(release=self.release_kv, num_resident_bytes=0))

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        self._first = self._version("first")
        self._reach("step")
        self._rest()
        output = super().execute(work)
        for index in range(len(output.token_ids)):
            if self._reach("row"):
                output.errors[index] = "a logits processor failed"
        return output

    def _compute(self, row: Any, move: Any, version: int, records: bool) -> None:
        super()._compute(row, move, self._version("last"), records)

    def _next_token(self, sequence_id: int, digest: int) -> int:
        seed, oldest = self.sequences[sequence_id].seed, self.kv_min_versions[sequence_id]
        return spelled_token(digest, seed, self._first, self._version("last"), oldest)

    def _version(self, name: str) -> int:
        return int(self._live[name][0])


class _ShadowMemory(CpuShadowMemory):
    """Memory for shadows, of which there may be none."""

    num_free_bytes = 1 << 40

    def __init__(self, reach: Callable[[str], Any]) -> None:
        self._reach = reach

    def allocate(self, num_bytes: int) -> Any:
        self._reach("shadow")
        return super().allocate(num_bytes)

    def prepare_copy(self, pairs: Any) -> Callable[[], None]:
        def copy() -> None:
            for source, target in pairs:
                target.copy_(source)
                self._reach("commit")

        return copy


class SpellingWorker:
    """What `InlineExecutor` asks of a worker. `reach(point)`: the fault plan's; it may raise, and takes time."""

    rank = 0
    module = _EMPTY
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        reach: Callable[[str], Any],
        sleep: Callable[[float], None],
        step_seconds: float,
        num_state_slots: int = 0,
    ) -> None:
        self.notes, self.sleep, self._reach = NoteBook(), sleep, reach
        self.step_seconds = step_seconds
        self.live = weights_of(0)
        self.runner = SpellingRunner(block_size, num_state_slots, self.live, reach, lambda: sleep(self.step_seconds))
        self.backend = SimpleNamespace(runs_ahead=False, score=self.score)
        memory = _ShadowMemory(reach)
        self.updater = WeightUpdater.of(self.live, [], PackedWeights(_EMPTY), memory, prepare=self._take_back)
        self.update = UpdateSession(self.updater)
        self.extensions = Extensions(TABLE, self)
        self.grammars = SimpleNamespace(close=lambda: None)
        self.max_model_len = max_model_len
        self.info = EngineInfo(
            config=EngineConfig(model="formula", skip_tokenizer_init=True),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[],
            dtype="int64",
            max_prefill_beside_decode=1 << 30,
            choices="a formula",
        )

    def shared_digest(self) -> str:
        return self.updater.digest()

    def live_weights(self) -> Mapping[str, Tensor]:
        return self.updater.live("live_weights")

    def score(
        self, sequences: list[list[int]], num_prompt: list[int], temperature: float
    ) -> Iterator[dict[int, TokenScores]]:
        """Minus the position of every token; a sequence is a piece."""
        for i, (ids, first) in enumerate(zip(sequences, num_prompt, strict=True)):
            self._reach("score")
            yield {i: TokenScores(-np.arange(first, len(ids), dtype=np.float32))}

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        self.updater.live("apply_model")
        return fn(self.module)

    def release_kv(self) -> None:
        self.runner.model.kv.release()

    def release_weights(self, *, forget: bool) -> None:
        self.updater.release(forget=forget)
        self.runner.release_weights(forget=forget)
        if forget:
            for tensor in self.live.values():
                tensor.fill_(FORGOTTEN)

    def restore_weights(self) -> None:
        self._reach("wake")
        self._take_back()

    def _take_back(self) -> None:
        self.runner.weights = "live"
