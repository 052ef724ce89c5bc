"""Several users of one service while replicas are killed and their number changes: right tokens, or a typed error."""

import random
import threading
import time
from collections import Counter

import pytest

from rollout_engine import EngineDeadError, GenerateTimeoutError, RequestError, RetryableError, SamplingParams
from tests.unit.fleet.fake_fleet import make_service

pytestmark = pytest.mark.slow
SECONDS = 8.0
PROMPTS = [[5 + i, 6, 7, 8 + i % 3] for i in range(6)]
PARAMS = [SamplingParams(max_tokens=k, ignore_eos=True, seed=k, n=1 + k % 3) for k in (3, 20, 60, 90)]
KINDS = [(prompt, params) for prompt in range(len(PROMPTS)) for params in range(len(PARAMS))]
STRATEGIES = ["prefix-aware", "requests", "kv-cache", "round-robin"]


def tokens(output):
    return [list(sample.token_ids) for sample in output.outputs]


class Users:
    """Threads that generate; `wrong` is what they got and should not have."""

    def __init__(self, service, seed, until):
        self._service, self._until = service, until
        self._expected = {kind: tokens(self._generate([kind])[0]) for kind in KINDS}
        self.counts, self.wrong = Counter(), []
        self._threads = [threading.Thread(target=self._use, args=(random.Random(seed * 10 + i),)) for i in range(5)]

    def start(self):
        for thread in self._threads:
            thread.start()

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a call never ended"

    def _generate(self, kinds, **options):
        prompts, params = [PROMPTS[prompt] for prompt, _ in kinds], [PARAMS[params] for _, params in kinds]
        return self._service.generate(prompts, params, use_tqdm=False, **options)

    def _use(self, choose):
        while time.monotonic() < self._until:
            kinds = choose.choices(KINDS, k=choose.randint(1, 5))
            name = choose.choice(["session_id", "replica_index", "timeout_seconds"])
            values = {"session_id": ["s", "t"], "replica_index": range(4), "timeout_seconds": [0.01, 0.05, 5.0]}
            try:
                self._check(kinds, self._generate(kinds, **{name: choose.choice(values[name])}))
            except GenerateTimeoutError as error:
                self._check(kinds, error.outputs)
                if [i for i, output in enumerate(error.outputs) if output is None] != list(error.num_tokens):
                    self.wrong.append(error)
                self.counts["late"] += 1
            except (RequestError, RetryableError) as error:  # the replica of that index is not there, or not now
                if name == "replica_index" or "the fleet" in str(error):
                    self.counts["refused"] += 1
                    time.sleep(0.01)
                else:
                    self.wrong.append(error)
            except Exception as error:
                self.wrong.append(error)

    def _check(self, kinds, outputs):
        for kind, output in zip(kinds, outputs, strict=True):
            if output is not None:
                self.counts["finished"] += 1
                if tokens(output) != self._expected[kind]:
                    self.wrong.append((kind, tokens(output)))


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_with_its_own_tokens_or_a_typed_error(seed):
    service, provider = make_service(3)
    choose, until = random.Random(seed), time.monotonic() + SECONDS
    users, killed = Users(service, seed, until), 0
    users.start()
    while time.monotonic() < until:
        time.sleep(choose.random() / 2)
        act = choose.choice(["kill", "scale", "balance"])
        alive = [replica for replica in list(provider.replicas.values()) if replica.client.dead_error is None]
        if act == "kill" and len(alive) > 1:
            choose.choice(alive).kill()
            killed += 1
        elif act == "scale":
            service.scale(choose.randint(1, 4))
        else:
            balancer = service.create_load_balancer(choose.choice(STRATEGIES))
            try:
                assert balancer.select_replica(choose.choice(PROMPTS)) in range(len(service.health()))
            except EngineDeadError as error:
                assert "none serves" in str(error)
            balancer._balancer.check_integrity()
        service.frontend.client.check_integrity()
    users.join()
    assert not users.wrong
    assert killed and min(users.counts["finished"], users.counts["late"]) > 0
    service.scale(2)
    while [each.state for each in service.health()].count("SYNCED") != 2:
        time.sleep(0.05)
    while service.get_num_unfinished_requests():
        time.sleep(0.05)
    assert len(service.frontend.streams) == 0
    service.shutdown()
