"""Replays the schedule of a post-mortem file without a model, to see whether the scheduler alone fails the same way."""

from collections import Counter
from contextlib import suppress
from itertools import accumulate

import msgspec

from rollout_engine.base.errors import RolloutEngineError
from rollout_engine.base.messages import EngineCoreRequest, KVLoad, ModelRunnerOutput, SchedulerOutput
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.core.fake_states import FakeKVError
from rollout_engine.core.fake_tier import FakeStore, num_slot_bytes, pack_slots
from rollout_engine.core.recorder import Recorder, call_entry
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.request_table import Preparation
from rollout_engine.core.tier import Tables, Tier
from rollout_engine.process import post_mortem

_POOLING = {"": None, "last": PoolingParams(kind="last"), "all": PoolingParams(kind="token")}
Rows = list[tuple[int, int, int]]


class Replayed(msgspec.Struct):
    """Outcome of a replay: how its schedule compares with the recorded one."""

    num_steps: int = 0
    difference: str = ""
    """The first step whose schedule is not the recorded one."""
    failure: str = ""
    """How the scheduler, its invariants or the KV blocks failed."""


def replay(lines: list[post_mortem.Line]) -> Replayed:
    """Replay a file until its end or the first failure. Schedules are compared if the file begins with the core."""
    header, *rest = lines
    assert isinstance(header, post_mortem.Header), "checked when it was read"
    config = msgspec.convert(header.config, CoreConfig)
    scripts, failed = _scripts(rest, config.vocab_size), _failed_steps(rest)
    executor = _Executor(
        block_size=config.block_size,
        vocab_size=config.vocab_size,
        scripts=scripts,
        fail_at_steps=failed,
        num_state_slots=config.num_state_slots,
    )
    tier = _ReplayedTier(executor) if config.has_tier else None
    core = EngineCore(executor, config, policy_version=header.policy_version, tier=tier)
    found, schedules = Replayed(), _Schedules()
    core.recorders.append(schedules)
    expected: list[post_mortem.StepLine] = []
    for line in rest:
        try:
            match line:
                case post_mortem.LiveLine(request) | post_mortem.AddLine(_, request):
                    core.add_request(_source(request, config.vocab_size, config.block_size))
                case post_mortem.CallLine(_, name, arguments, False):
                    with suppress(RolloutEngineError):  # it was refused then, too
                        call_entry(core, name, arguments)
                case post_mortem.StepLine():
                    expected.append(line)
                case post_mortem.EndLine(_, _, ended):
                    found.num_steps += 1
                    if tier is not None:
                        tier.starts = {row[0]: row[1] for each in reversed(expected) for row in each.rows}
                    core.step()
                    core.check_integrity()
                    if header.is_whole and not found.difference:
                        found.difference = _difference(expected, schedules.scheduled)
                    core.abort_sequences([sequence_id for sequence_id, reason in ended if reason == "error"])
                    expected, schedules.scheduled = [], []
        except Exception as problem:
            found.failure = f"{type(problem).__name__}: {problem}"
        found.failure = found.failure or executor.failure
        if found.failure:
            break
    return found


class _Executor(FakeExecutor):
    """The fake model, and the first wrong access to its KV."""

    failure = ""

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return super().execute(work)
        except FakeKVError as problem:
            self.failure = self.failure or f"FakeKVError: {problem}"
            raise


class _ReplayedTier(Tier):
    """Loads as many blocks of a sequence as the recorded engine had found for it, here or there, when it was admitted.

    A request for which KV was fetched waited meanwhile, and waits here for nothing: schedules may differ by that.
    """

    def __init__(self, executor: FakeExecutor) -> None:
        store = executor.transfer.store = FakeStore()
        sizes = {"block_bytes": num_slot_bytes(executor.block_size), "state_bytes": num_slot_bytes(1)}
        super().__init__(store, weights=lambda: "live", save_now=executor.save_kv, **sizes)
        self.starts: dict[int, int] = {}
        """Sequence id -> tokens computed before its row of the next recorded step."""

    def prepare(self, tables: Tables, request: Request, other: Preparation | None) -> Preparation | None:
        return other

    def load_prefix(self, tables: Tables, sequence: Sequence) -> None:
        size, start = tables.block_size, self.starts.get(sequence.sequence_id, 0)
        if start <= sequence.num_computed_tokens or start % size:
            return
        digests = list(accumulate(sequence.token_ids[:start], mix, initial=0))[1:]
        first = len(sequence.prefix)
        rows = tables.next_blocks(sequence, start // size)
        missing = [first + index for index, (block, _) in enumerate(rows) if block < 0]
        for block, index in zip(tables.attach_found(sequence, rows), missing, strict=True):
            slots = [(digest, False) for digest in digests[index * size : (index + 1) * size]]
            self._loads.append(KVLoad(block, memoryview(pack_slots(slots, 0))))
        if tables.keeps_states:
            data = memoryview(pack_slots([(digests[-1], False)], 0))
            self._loads.append(KVLoad(tables.attach_state(sequence), data, is_state=True))


class _Schedules(Recorder):
    """Collects the rows of the submitted steps."""

    def __init__(self) -> None:
        self.scheduled: list[Rows] = []

    def record_schedule(self, work: SchedulerOutput, rows: list[Sequence], sampled: list[Sequence]) -> None:
        found = [(row.sequence_id, row.num_computed_tokens, row.num_scheduled_tokens) for row in work.scheduled]
        self.scheduled.append(found)


def _scripts(lines: list[post_mortem.Line], stop_id: int) -> dict[int, list[int]]:
    """Tokens of the sequences that ended at a stop token: any, of each sequence its own, and then that one."""
    gained: Counter[int] = Counter()
    scripts: dict[int, list[int]] = {}
    for line in lines:
        if isinstance(line, post_mortem.StepLine):
            gained.update(line.samples)
        elif isinstance(line, post_mortem.EndLine):
            for sequence_id in (sequence_id for sequence_id, reason in line.ended if reason == "stop"):
                before = range(gained[sequence_id] - 1)
                scripts[sequence_id] = [mix(sequence_id, i) % stop_id for i in before] + [stop_id]
    return scripts


def _failed_steps(lines: list[post_mortem.Line]) -> set[int]:
    """Numbers, counted from the first step of the file, of steps whose sequences all ended by an error."""
    steps = [line for line in lines if isinstance(line, post_mortem.StepLine | post_mortem.EndLine)]
    first = next((line.step for line in steps if isinstance(line, post_mortem.StepLine)), 0)
    failed = set()
    for line, after in zip(steps, steps[1:], strict=False):
        if isinstance(line, post_mortem.StepLine) and isinstance(after, post_mortem.EndLine) and line.rows:
            errors = {sequence_id for sequence_id, reason in after.ended if reason == "error"}
            if errors >= {row[0] for row in line.rows}:
                failed.add(line.step - first)
    return failed


def _source(request: post_mortem.Request, vocab_size: int, block_size: int) -> EngineCoreRequest:
    """A request with as many tokens as the recorded one; beginnings that were equal there are equal here."""
    blocks, num_tokens = request.blocks, request.num_tokens
    num_known = min(num_tokens, block_size * len(blocks))
    known = [mix(blocks[i // block_size], i) % vocab_size for i in range(num_known)]
    return EngineCoreRequest(
        prompt_token_ids=known + [mix(request.id, i) % vocab_size for i in range(num_known, num_tokens)],
        params=SamplingParams(n=request.n, prompt_logprobs=0 if request.scores_prompt else None),
        max_tokens=request.max_tokens,
        seed=request.id,
        first_sequence_id=request.id,
        eos_token_ids=[vocab_size],
        priority=request.priority,
        cache_salt=request.salt,
        pooling=_POOLING[request.pools],
    )


def _difference(expected: list[post_mortem.StepLine], found: list[Rows]) -> str:
    recorded = [line.rows for line in expected]
    if recorded == found:
        return ""
    step = expected[0].step if expected else "without work"
    return f"step {step}: recorded rows {str(recorded)[:200]}, replayed {str(found)[:200]}"
