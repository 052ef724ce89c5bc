"""A core on a fake executor, and the slow truth beside it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rollout_engine.core.door import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor, fake_next_token
from rollout_engine.messages import EngineCoreOutput, EngineCoreRequest, SchedulerOutput
from rollout_engine.sampling_params import SamplingParams
from rollout_engine.seeds import child_seed

Key = tuple[str, int]


class Rig:
    """Drives an EngineCore, checks every output as it comes, and knows what each sequence should have said."""

    def __init__(self, *, policy_version: int = 0, **config: Any) -> None:
        sizes: dict[str, Any] = dict(
            num_blocks=64, block_size=4, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, vocab_size=97
        )
        self.config = CoreConfig(**(sizes | config))
        self.fail_at_steps: set[int] = set()
        self.errors: dict[str, str] = {}
        self.executor = FakeExecutor(
            block_size=self.config.block_size,
            vocab_size=self.config.vocab_size,
            fail_at_steps=self.fail_at_steps,
            errors=self.errors,
        )
        self.core = EngineCore(self, self.config, policy_version=policy_version)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[Key, list[int]] = {}
        self.ends: dict[Key, EngineCoreOutput] = {}
        self.works: list[SchedulerOutput] = []
        self.oldest_kv = policy_version
        """No KV older than this may be attended."""

    def execute(self, work: SchedulerOutput) -> Any:
        assert len(work.scheduled) <= self.config.max_num_seqs
        assert work.num_tokens <= self.config.max_num_batched_tokens
        assert work.policy_version == self.core.policy_version
        self.works.append(work)
        return self.executor.execute(work)

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
        **params: Any,
    ) -> None:
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**params),
            max_tokens=max_tokens,
            seed=seed,
            eos_token_ids=list(eos),
            priority=priority,
            cache_salt=salt,
        )
        self.core.add_request(request)
        self.requests[request_id] = request
        for index in range(request.params.n):
            self.tokens[request_id, index] = []
            self.ends.pop((request_id, index), None)

    def step(self) -> list[EngineCoreOutput]:
        outputs = self.core.step()
        self.core.check_integrity()
        for output in outputs:
            self._record(output)
        return outputs

    def abort(self, *request_ids: str) -> list[EngineCoreOutput]:
        outputs = self.core.abort_requests(request_ids)
        self.core.check_integrity()
        for output in outputs:
            assert (output.finish_reason, output.new_token_ids) == ("abort", [])
            self._record(output)
        return outputs

    def commit(self, version: int, kv: str = "keep") -> int:
        grows = version > self.core.policy_version
        if kv == "recompute" or not grows:
            self.oldest_kv = version
        num_live = self.core.commit_version(version, kv)
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
        assert self.core.step() == []
        self.core.check_integrity()
        assert self.core.cache_usage() == 0.0
        assert self.executor.sequences == {}

    def assert_true(self, key: Key) -> None:
        """Tokens and end of one sequence are what it gets when computed alone."""
        truth, (reason, stop_reason) = self.truth(key)
        end = self.ends[key]
        if end.finish_reason in ("abort", "error"):
            assert self.tokens[key] == truth[: len(self.tokens[key])], key
        else:
            assert (self.tokens[key], end.finish_reason, end.stop_reason) == (truth, reason, stop_reason), key

    def truth(self, key: Key) -> tuple[list[int], tuple[str, int | None]]:
        request = self.requests[key[0]]
        params, seed = request.params, child_seed(request.seed, key[1])
        stops = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        context, out = list(request.prompt_token_ids), []
        while len(out) < request.max_tokens:
            banned = stops if len(out) < params.min_tokens else ()
            token_id = fake_next_token(context, seed, self.config.vocab_size, banned)
            context.append(token_id)
            out.append(token_id)
            if token_id in stops and len(out) >= params.min_tokens:
                return out, ("stop", None if token_id in request.eos_token_ids else token_id)
        return out, ("length", None)

    def _record(self, output: EngineCoreOutput) -> None:
        key = (output.request_id, output.index)
        assert key not in self.ends, f"{key} ended twice"
        assert len(output.new_token_ids) == (output.finish_reason not in ("abort", "error"))
        assert output.policy_version == self.core.policy_version
        assert self.oldest_kv <= output.kv_min_version <= output.policy_version
        if output.new_token_ids:
            n = self.requests[output.request_id].params.n
            name = f"{output.index}_{output.request_id}" if n > 1 else output.request_id
            assert output.kv_min_version == self.executor.kv_min_versions[name]
        self.tokens[key] += output.new_token_ids
        if output.finish_reason is not None:
            self.ends[key] = output


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    return Rig
