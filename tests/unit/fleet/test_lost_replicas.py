"""Requests that meet the end of their replica."""

import threading
import time

import numpy as np
import pytest

from rollout_engine import EngineDeadError, SamplingParams
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.seeds import child_seed
from rollout_engine.core.fake_executor import fake_features, fake_next_token
from rollout_engine.engine.client import Route
from rollout_engine.fleet.plan.replica_state import MAX_FAILURES, Replica, ReplicaState, describe_loss
from tests.unit.fake_engine import VOCAB_SIZE
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


IMAGE = 200


class Heard:
    """A listener that keeps tokens and ends."""

    def __init__(self):
        self.tokens, self.ended = {}, {}

    def fail_all(self, error):
        self.ended["all"] = error

    def deliver(self, outputs):
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            self.tokens.setdefault(sequence_id, []).append(token_id)
        self.ended |= {end.sequence_id: (end.finish_reason, end.error) for end in outputs.ended}

    def wait(self, condition):
        deadline = time.monotonic() + 60
        while not condition(self):
            assert time.monotonic() < deadline, (self.tokens, self.ended)
            time.sleep(0.002)


def test_a_request_whose_replica_dies_goes_on_elsewhere_with_its_pictures():
    service, provider = make_service(image_token_id=IMAGE)
    prompt = [5, 6, IMAGE, IMAGE, IMAGE, 7]
    picture = Picture.of({"pixel_values": np.ones((3, 4), np.float32)})
    request = EngineCoreRequest(
        prompt_token_ids=prompt,
        params=SamplingParams(n=2, ignore_eos=True),
        max_tokens=60,
        seed=3,
        first_sequence_id=0,
        pictures=[PlacedPicture(2, 5, picture)],
    )
    with service:
        client, heard, lost = service.frontend.client, Heard(), provider.replicas[1]
        client.listen(heard)
        lost.executor.before_step = lambda: time.sleep(0.01)
        client.add_request(request, Route(replica_index=1))
        heard.wait(lambda heard: len(heard.tokens.get(1, ())) > 5)
        provider.starts = False
        lost.executor.before_step = lambda: time.sleep(0.3)  # so that it does not end there
        lost.kill()
        heard.wait(lambda heard: len(heard.ended) == 2)
        assert "all" not in heard.ended and provider.replicas[0].executor.num_tokens_computed > 60
        ended = dict(heard.ended)
    features = fake_features(prompt, request.pictures, IMAGE)
    for index in range(2):
        context = [features.get(position, token_id) for position, token_id in enumerate(prompt)]
        for token_id in heard.tokens[index]:
            assert token_id == fake_next_token(context, child_seed(3, index), VOCAB_SIZE)
            context.append(token_id)
    assert [len(heard.tokens[index]) for index in range(2)] == [60, 60]
    assert ended == {0: ("length", None), 1: ("length", None)}


@pytest.mark.parametrize(
    ("num_failures", "num_requests", "others_serve", "words"),
    [
        (1, 0, True, "It is started again."),
        (3, 1, True, "It is started again in 2 s. The request it had continues at another replica."),
        (2, 5, False, "It is started again in 1 s. The 5 requests it had continue when a replica serves."),
        (MAX_FAILURES, 2, True, "It is given up after 6 failures in a row. The 2 requests it had continue at another"),
    ],
)
def test_the_log_says_what_happens_after_a_loss(num_failures, num_requests, others_serve, words):
    replica = Replica(0)
    replica.num_failures = num_failures
    replica.state = ReplicaState.DEAD if num_failures == MAX_FAILURES else ReplicaState.STARTING
    assert describe_loss(replica, num_requests, others_serve=others_serve).startswith(words)


def test_a_fleet_does_not_ask_for_a_new_engine_when_it_makes_one(caplog):
    service, provider = make_service()
    lost = EngineDeadError(f"The engine's core is gone: it was killed.{EngineDeadError.ADVICE}")
    with service:
        client = service.frontend.client
        client.handle_loss(client._members[0], lost)
        assert str(lost).endswith("Make a new engine.")
    assert "replica 0 is lost: The engine's core is gone: it was killed. It is started again." in caplog.text
    assert "new engine" not in caplog.text
