"""A core on a fake executor, and what each sequence computed alone would give."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerOutput
from rollout_engine.base.pictures import PictureInfo, PlacedPicture
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed
from rollout_engine.base.thinking import Thinking, ThinkingState
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import (
    FakeExecutor,
    fake_features,
    fake_next_token,
    fake_pooled,
    fake_routed_experts,
)
from rollout_engine.core.fake_states import FakeKVError
from tests.unit.core.failed_step import Failed
from tests.unit.core.recorded_states import RecordedStates

Key = tuple[str, int]
IMAGE = 22
"""Token that stands for pictures; outside of their spans it is an ordinary one."""


@dataclass
class Said:
    """One sequence in one `EngineCoreOutputs`."""

    request_id: str
    index: int
    policy_version: int
    new_token_ids: list[int] = field(default_factory=list)
    kv_min_version: int | None = None
    num_cached_tokens: int = 0
    """Of its request, as far as reported."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None


class Rig:
    """Drives an EngineCore, checks every output as it comes, and knows the tokens that each sequence should have."""

    def __init__(self, *, policy_version: int = 0, eager: bool = False, **config: Any) -> None:
        """`eager`: a step runs when it is submitted, as on an idle device, not when its result is asked for."""
        sizes: dict[str, Any] = dict(
            num_blocks=64, block_size=4, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, vocab_size=97
        )
        sizes["pooling"] = PoolingInfo(hidden_size=2)
        sizes["routing"] = RoutingInfo(num_layers=1, num_experts=256, top_k=2)
        sizes["pictures"] = PictureInfo(IMAGE)
        self.config = CoreConfig(**(sizes | config))
        self.splits_no_picture = self.config.pictures is not None and self.config.pictures.attention != "causal"
        """One chunk of a step may be a picture that is larger than the rest of the budget."""
        self.fail_at_steps: set[int] = set()
        self.errors: dict[int, str] = {}
        self.uncomputable: set[int] = set()
        self.executor = FakeExecutor(
            block_size=self.config.block_size,
            vocab_size=self.config.vocab_size,
            fail_at_steps=self.fail_at_steps,
            errors=self.errors,
            uncomputable=self.uncomputable,
            num_state_slots=self.config.num_state_slots,
            image_token_id=IMAGE,
        )
        self.draft = self.executor.draft
        self.core = EngineCore(self, self.config, policy_version=policy_version)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[Key, list[int]] = {}
        self.ends: dict[Key, Said] = {}
        self.keys: dict[int, Key] = {}
        """Sequence id -> (request id, sample index); the ids count up from 0 in the order of `add`."""
        self.num_cached_tokens: dict[str, int] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.pooled: dict[str, Any] = {}
        """Request id -> result of a pooling request."""
        self.pooled_by: dict[int, tuple[int, int]] = {}
        """Sequence id -> policy version and oldest KV of what it was pooled to."""
        self.states = RecordedStates()
        self.prompt_routed: dict[str, list[Any]] = {}
        """Request id -> experts of its prompt's tokens but the last."""
        self.routed: dict[Key, list[Any]] = {}
        """Experts that came with the tokens of a sequence that asks."""
        self.works: list[SchedulerOutput] = []
        self.drawn: dict[tuple[int, int], tuple[int, int]] = {}
        """(sequence id, tokens it had before) -> policy version and oldest KV of what was drawn for it then."""
        self.eager = eager
        self.failed: Failed | None = None
        self.release_kv = self.executor.release_kv
        self.release_weights = self.executor.release_weights
        self.restore_weights = self.executor.restore_weights
        self.oldest_kv = policy_version
        """No KV older than this may be attended."""

    def submit(self, work: SchedulerOutput) -> Callable[[], Any]:
        run = partial(self.execute, work)
        if not self.eager:
            return run
        outcome: Future[Any] = Future()
        if self.failed is not None and not self.failed.raised:
            outcome.set_exception(AssertionError("the result of a step behind a failed one was asked for"))
            return outcome.result
        try:
            outcome.set_result(run())
        except FakeKVError:
            raise
        except Exception as error:
            self.failed = Failed(error)
            return self.failed
        return outcome.result

    @property
    def next_step(self) -> int:
        """Number of the step that is submitted next."""
        return self.core.stats.num_steps + len(self.core._steps)

    def execute(self, work: SchedulerOutput) -> Any:
        assert len(work.scheduled) <= self.config.max_num_seqs
        largest = max((row.num_scheduled_tokens for row in work.scheduled), default=0) if self.splits_no_picture else 0
        assert work.num_scheduled_tokens < self.config.max_num_batched_tokens + max(1, largest)
        assert work.policy_version == self.core.policy_version
        self.works.append(work)
        before = {name: state.num_scored for name, state in self.executor.sequences.items()}
        result = self.executor.execute(work)
        asks = {name for name, state in self.executor.sequences.items() if state.params.prompt_logprobs is not None}
        scored = asks & {row.sequence_id for row in work.scheduled if row.num_scheduled_tokens > 1}
        after = {name: state.num_scored for name, state in self.executor.sequences.items() if name in scored}
        num_scored = sum(count - before.get(name, 0) for name, count in after.items())
        assert num_scored < self.config.max_scored_tokens + max(1, largest)
        for index in result.pooled:
            sequence_id = work.scheduled[index].sequence_id
            kv_min_version = self.executor.kv_min_versions[sequence_id]
            assert self.oldest_kv <= kv_min_version <= work.policy_version
            self.pooled_by[sequence_id] = work.policy_version, kv_min_version
        for task, num_drawn in zip(work.samples, result.num_drawn or [1] * len(work.samples), strict=True):
            state = self.executor.sequences[task.sequence_id]
            kv_min_version = self.executor.kv_min_versions[task.sequence_id]
            assert self.oldest_kv <= kv_min_version <= work.policy_version
            for place in range(len(state.token_ids) - num_drawn, len(state.token_ids)):
                self.drawn[task.sequence_id, place] = work.policy_version, kv_min_version
        return result

    def add(
        self,
        request_id: str,
        prompt: Iterable[int] = range(10),
        *,
        max_tokens: int = 8,
        seed: int = 7,
        eos: Iterable[int] = (),
        priority: int = 0,
        salt: str = "",
        pooling: PoolingParams | None = None,
        lora: str = "",
        pictures: Iterable[PlacedPicture] = (),
        thinking: Thinking | None = None,
        **params: Any,
    ) -> None:
        request = EngineCoreRequest(
            prompt_token_ids=list(prompt),
            params=SamplingParams(**params),
            max_tokens=max_tokens if pooling is None else 0,
            seed=seed,
            first_sequence_id=(first := len(self.keys)),
            eos_token_ids=list(eos),
            priority=priority,
            cache_salt=salt,
            pooling=pooling,
            lora=lora,
            pictures=list(pictures),
            thinking=thinking,
        )
        self.core.add_request(request)
        self.requests[request_id] = request
        for index in range(request.params.n):
            self.keys[first + index] = (request_id, index)
            self.tokens[request_id, index] = []
            self.ends.pop((request_id, index), None)

    def step(self) -> list[Said]:
        outputs = self.core.step()
        self.core.check_integrity()
        return self._record(outputs)

    def label(self, sequence_id: int) -> str:
        """What tests call a sequence: "a" like its request, or "0_a", "1_a" where it is one of several samples."""
        request_id, index = self.keys[sequence_id]
        return f"{index}_{request_id}" if self.requests[request_id].params.n > 1 else request_id

    def ids(self, name: str) -> list[int]:
        """Sequence ids that a request's or sequence's name has or had, the newest last; none for an unknown name."""
        return [id for id, (request_id, _) in self.keys.items() if name in (request_id, self.label(id))]

    def abort(self, *names: str) -> list[Said]:
        return self._take_ends(self.core.abort_sequences(id for name in names for id in self.ids(name)))

    def pause(self, mode: str, **options: Any) -> list[Said]:
        return self._take_ends(self.core.pause(mode, **options))

    def sleep(self, level: int, mode: str) -> list[Said]:
        return self._take_ends(self.core.sleep(level, mode))

    def resume(self) -> None:
        self.core.resume()
        self.core.check_integrity()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self.core.wake_up(tags)
        self.core.check_integrity()

    def update(self, *, kv: str = "keep", breaks_off: bool = False) -> None:
        """A whole update, or one that breaks off in its commit."""
        self.core.begin_update()
        self.core.quiesce()
        if not breaks_off:
            self.executor.weights = "live"
            self.commit(self.core.policy_version + 1, kv)
        self.core.end_update(dirty=breaks_off)
        self.core.check_integrity()

    def commit(self, version: int, kv: str = "keep") -> int:
        grows = version > self.core.policy_version
        num_live = self.core.commit_version(version, kv)
        if kv == "recompute" or not grows:
            self.oldest_kv = version
        self.core.check_integrity()
        return num_live

    def run(self, max_steps: int = 2_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"still {self.core.num_unfinished_requests} requests after {max_steps} steps")

    def assert_clean(self) -> None:
        """Every sequence has one end and true tokens; nothing is left in core or runner."""
        assert not self.core.has_unfinished_requests() and self.core.num_unfinished_requests == 0
        assert set(self.ends) == set(self.tokens)
        for key in self.tokens:
            self.assert_true(key)
        for request_id, request in self.requests.items():
            self.assert_prompt_scored(request_id, request)
            self.assert_pooled(request_id, request)
            self.assert_routed(request_id, request)
            self.states.check(request_id, request, self.tokens)
        assert self.step() == []
        self.core.check_integrity()
        assert self.core.cache_usage() == self.core.metrics().state_usage == 0.0
        assert self.executor.sequences == {}

    def assert_true(self, key: Key) -> None:
        """Tokens and end of one sequence are what it gets when computed alone."""
        truth, (reason, stop_reason) = self.truth(key)
        end = self.ends[key]
        if end.finish_reason in ("abort", "error"):
            assert self.tokens[key] == truth[: len(self.tokens[key])], key
        else:
            assert (self.tokens[key], end.finish_reason, end.stop_reason) == (truth, reason, stop_reason), key

    def assert_prompt_scored(self, request_id: str, request: EngineCoreRequest) -> None:
        """Log-probs of the whole prompt came, if it asked for them and got as far as a token."""
        started = any(self.tokens[request_id, index] for index in range(request.params.n))
        if request.params.prompt_logprobs is None:
            assert request_id not in self.prompt_logprobs
        elif started:
            _, *scored = self.prompt_logprobs[request_id]
            assert scored == pytest.approx([-1 - t / self.config.vocab_size for t in request.prompt_token_ids[1:]])

    def assert_pooled(self, request_id: str, request: EngineCoreRequest) -> None:
        """A pooling request that stopped has its result, and no other request has one."""
        stopped = request.pooling is not None and self.ends[request_id, 0].finish_reason == "stop"
        assert stopped == (request_id in self.pooled), request_id
        if stopped:
            expected = fake_pooled(request.prompt_token_ids, request.pooling)
            assert self.pooled[request_id].data.tolist() == expected.tolist()

    def assert_routed(self, request_id: str, request: EngineCoreRequest) -> None:
        """The experts of each token but the last came, if it asked for them, and of no other request."""
        for index in range(request.params.n):
            tokens = self.tokens[request_id, index]
            if request.params.return_routed_experts and tokens:
                found = self.prompt_routed[request_id] + self.routed[request_id, index]
                assert found == fake_routed_experts(seen_prompt(request) + tokens).tolist()
            else:
                assert (request_id, index) not in self.routed

    def truth(self, key: Key) -> tuple[list[int], tuple[str, int | None]]:
        request = self.requests[key[0]]
        if request.pooling is not None:
            return [], ("stop", None)
        params, seed = request.params, child_seed(request.seed, key[1])
        stops = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        context, out = seen_prompt(request), []
        while len(out) < request.max_tokens:
            banned = stops if len(out) < params.min_tokens else ()
            forced = request.thinking and ThinkingState(request.thinking, 0).next_forced(out)
            drawn = fake_next_token(context, seed, self.config.vocab_size, banned)
            token_id = drawn if forced is None else forced
            context.append(token_id)
            out.append(token_id)
            if token_id in stops and len(out) >= params.min_tokens:
                return out, ("stop", None if token_id in request.eos_token_ids else token_id)
        return out, ("length", None)

    @property
    def leaves_outputs(self) -> bool:
        """Whether outputs of earlier steps may be left for later calls."""
        return self.config.num_ahead > 0 or self.config.speculation is not None

    def _take_ends(self, outputs: EngineCoreOutputs) -> list[Said]:
        self.core.check_integrity()
        said = self._record(outputs)
        assert self.leaves_outputs or all((s.finish_reason, s.new_token_ids) == ("abort", []) for s in said)
        return said

    def _record(self, outputs: EngineCoreOutputs) -> list[Said]:
        assert outputs.policy_version == self.core.policy_version or self.leaves_outputs
        assert len(outputs.sequence_ids) == len(outputs.token_ids) == len(outputs.kv_min_versions)
        asked = outputs.routed_experts is not None
        for first, count in outputs.num_cached_tokens.items():
            self.num_cached_tokens[self.keys[first][0]] = count
        for first, found in outputs.prompt_logprobs.items():
            assert self.keys[first][0] not in self.prompt_logprobs, "the prompt's log-probs came twice"
            self.prompt_logprobs[self.keys[first][0]] = found.logprobs.tolist()
            assert found.ranks is not None and len(found.ranks) == len(found.logprobs)
        self.states.record(outputs, self.keys)
        for first, rows in outputs.prompt_routed_experts.items():
            self.prompt_routed.setdefault(self.keys[first][0], rows.tolist())
        for sequence, row in zip(outputs.sequence_ids, outputs.routed_experts, strict=True) if asked else ():
            if self.requests[self.keys[sequence][0]].params.return_routed_experts:
                self.routed.setdefault(self.keys[sequence], []).append(row.tolist())
        for first, result in outputs.pooled.items():
            name = self.keys[first][0]
            assert name not in self.pooled and (name, 0) not in self.ends, f"{name} was pooled twice, or after its end"
            assert self.pooled_by[first] == (outputs.policy_version, result.kv_min_version)
            self.pooled[name] = result
        said: dict[int, Said] = {}
        for sequence in dict.fromkeys([*outputs.sequence_ids, *(end.sequence_id for end in outputs.ended)]):
            request_id, index = self.keys[sequence]
            found = self.num_cached_tokens.get(request_id, 0)
            said[sequence] = Said(request_id, index, outputs.policy_version, num_cached_tokens=found)
        columns = outputs.sequence_ids, outputs.token_ids, outputs.kv_min_versions
        for sequence, token_id, kv in zip(*columns, strict=True):
            said[sequence].new_token_ids.append(token_id)
            said[sequence].kv_min_version = kv
        for end in outputs.ended:
            each = said[end.sequence_id]
            assert each.finish_reason is None, f"{each} ended twice"
            each.finish_reason, each.stop_reason, each.error = end.finish_reason, end.stop_reason, end.error
        for sequence, each in said.items():
            self._check(sequence, each)
        return [*said.values()]

    def _check(self, sequence: int, said: Said) -> None:
        key = (said.request_id, said.index)
        assert key not in self.ends, f"{key} ended twice"
        pools = self.requests[said.request_id].pooling is not None
        leaves_several = self.config.speculation or self.config.num_ahead > 1
        may_bring_none = pools or said.finish_reason in ("abort", "error") or (said.finish_reason and leaves_several)
        assert len(said.new_token_ids) == 1 or ((pools or may_bring_none) and not said.new_token_ids)
        if said.new_token_ids:
            had = len(self.requests[said.request_id].prompt_token_ids) + len(self.tokens[key])
            assert self.drawn[sequence, had] == (said.policy_version, said.kv_min_version)
        self.tokens[key] += said.new_token_ids
        if said.finish_reason is not None:
            self.ends[key] = said


def seen_prompt(request: EngineCoreRequest) -> list[int]:
    """A prompt as the fake model sees it: features in the places of pictures' tokens."""
    features = fake_features(request.prompt_token_ids, request.pictures, IMAGE)
    return [features.get(position, token_id) for position, token_id in enumerate(request.prompt_token_ids)]


@pytest.fixture(params=["in turn", "ahead", "ahead at once"])
def make_rig(request: pytest.FixtureRequest) -> Callable[..., Rig]:
    return partial(Rig, async_scheduling=request.param != "in turn", eager=request.param == "ahead at once")


@pytest.fixture
def make_rig_in_turn() -> Callable[..., Rig]:
    """For what depends on the step in which something happens."""
    return Rig
