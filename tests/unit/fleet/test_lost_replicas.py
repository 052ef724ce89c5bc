"""Requests that meet the end of their replica."""

import threading
import time

from rollout_engine import SamplingParams
from tests.unit.fleet.fake_fleet import make_service

PROMPTS = [[5 + i, 6, 7, 8] for i in range(4)]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)


def tokens(outputs):
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def test_requests_on_the_way_to_a_replica_that_dies_go_on_elsewhere():
    service, provider = make_service()
    with service:
        expected = tokens(service.generate(PROMPTS, PARAMS, use_tqdm=False))
        provider.starts, lost, found = False, provider.replicas[1], []
        release = lost.client.hold_sent()
        sender = threading.Thread(
            target=lambda: found.extend(service.generate(PROMPTS, PARAMS, use_tqdm=False, replica_index=1))
        )
        sender.start()
        while service.get_balancer_stats().num_requests[1] < len(PROMPTS):
            time.sleep(0.005)
        lost.kill(unnoticed=release)
        sender.join()
        assert tokens(found) == expected
