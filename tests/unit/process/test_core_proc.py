"""The busy loop of a core's process over a fake model: what one client does to another, counted in steps."""

import itertools
import threading

import pytest

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.metrics import PictureStats
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.children.values import pack, unpack
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.health import Health, IoStats
from rollout_engine.process import core_proc, quotas
from rollout_engine.process.client_routing import first_sequence_of
from rollout_engine.process.core_proc import EngineCoreProc
from rollout_engine.process.inbox import ClientLeft, Drain, FromClient, Inbox, Stop
from rollout_engine.process.wire import (
    Abort,
    AddRequest,
    Call,
    Cancel,
    ForgetPictures,
    LiveVersion,
    Outputs,
    Refused,
    Reply,
)
from tests.unit.fake_engine import BLOCK_SIZE, VOCAB_SIZE, FakeModel

FLOODER, BYSTANDER = 0, 1


class FakeSocket:
    """What the busy loop needs of a `CoreSocket`: an inbox, and a list of what was sent."""

    def __init__(self):
        self.inbox, self.stats, self.picture_stats, self.sent = Inbox(), IoStats(), PictureStats(), []
        self.gone, self.cancelled = set(), set()
        self.on_send = lambda client_index, message: None

    def drain(self, reason):
        self.draining = reason

    def send_all(self, message):
        self.send(None, message)

    def send(self, client_index, message):
        self.sent.append((client_index, message))
        self.on_send(client_index, message)

    def answers(self, kind, client_index=FLOODER):
        return [message for index, message in self.sent if index == client_index and isinstance(message, kind)]


class Core:
    """An `EngineCoreProc`; every look at its clock takes a millisecond, so that a step takes one."""

    def __init__(self, directory):
        self.model = FakeModel(max_model_len=4096)
        self.model.caller_left, self.model.runs_beside_steps = (lambda caller: None), (lambda method: False)
        config = CoreConfig(
            num_blocks=4096,
            block_size=BLOCK_SIZE,
            max_model_len=4096,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            vocab_size=VOCAB_SIZE,
        )
        self.core, self.io = EngineCore(self.model, config), FakeSocket()
        ticks = itertools.count()
        self.proc = EngineCoreProc(self.core, self.model, self.io, str(directory), lambda: next(ticks) / 1000)

    def put(self, client_index, *messages):
        for message in messages:
            self.io.inbox.put(FromClient(client_index, message))

    def run(self, is_over=lambda: True):
        """Until all that was put is done, nothing is in flight any more, and `is_over()`."""
        turn = self.proc.driver.turn

        def turn_and_look():
            turn()
            if not (self.io.inbox.qsize() or self.core.num_unfinished_requests) and is_over():
                self.io.inbox.put_first(Stop("the test is over"))

        self.proc.driver.turn = turn_and_look
        self.proc.run()


@pytest.fixture
def core(tmp_path):
    return Core(tmp_path)


def request(client_index, max_tokens=5, number=0, **params):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    first = first_sequence_of(client_index) + number * params.n
    return EngineCoreRequest(
        prompt_token_ids=[5], params=params, max_tokens=max_tokens, seed=0, first_sequence_id=first
    )


FLOODS = {
    "aborts": Abort([7]),
    "calls": Call(1, "get_core_metrics", *pack({})),
    "unknown calls": Call(1, "nothing", *pack({})),
    "refused requests": AddRequest(request(BYSTANDER)),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_one_client_leaves_the_steps_of_another_their_pace(core, flood):
    core.put(FLOODER, *[FLOODS[flood]] * 2000)
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=50, output_kind="delta")))
    waiting = []

    def watch(client_index, message):
        if client_index == BYSTANDER and isinstance(message, Outputs):
            waiting.append(core.io.inbox.qsize())
            if message.steps[-1].ended:
                core.io.inbox.put_first(Stop("the bystander has ended"))

    core.io.on_send = watch
    core.proc.run()
    assert len(waiting) == 50
    taken = [before - after for before, after in itertools.pairwise([2001, *waiting])]
    assert max(taken) <= 4, f"messages taken between two of the bystander's tokens: {taken}"


def test_a_flood_of_tiny_requests_costs_a_stream_turns_and_its_share_of_the_batch(core):
    """Each message takes as long as a step here: then at most some messages and one step come between two tokens."""
    num_messages, between = 400, []
    num_taken_before = 0
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=50)))
    core.put(FLOODER, *(AddRequest(request(FLOODER, max_tokens=1, number=i)) for i in range(num_messages)))
    num_waiting = core.io.inbox.qsize

    def note(client_index, message):
        nonlocal num_taken_before
        if client_index == BYSTANDER and isinstance(message, Outputs):
            num_taken = num_messages + 1 - num_waiting()
            between.append((num_taken - num_taken_before, core.core.stats.num_steps))
            num_taken_before = num_taken

    core.io.on_send = note
    core.run()
    steps = [step for _, step in between]
    assert len(between) == 50, "it has a token of every step"
    assert steps == list(range(steps[0], steps[0] + 50)), "no step passes that it is not in"
    assert max(taken for taken, _ in between) <= 4, "messages were taken for longer than a step takes"
    assert num_taken_before < num_messages, "the flood had ended before the stream"
    assert not core.io.answers(Refused), "every request of the flood is computed"


def test_messages_get_as_much_time_as_steps(core):
    core.model.before_step = lambda: [core.proc._clock() for _ in range(98)]  # a step of a tenth of a second
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=20, output_kind="delta")))
    core.put(FLOODER, *[FLOODS["aborts"]] * 1000)
    waiting = []
    core.io.on_send = lambda *_: waiting.append(core.io.inbox.qsize())
    core.run()
    taken = [before - after for before, after in itertools.pairwise(waiting) if after]
    assert taken and all(90 <= count <= 110 for count in taken)


@pytest.mark.parametrize("n", [1, 4])
def test_samples_in_flight_are_bounded_for_each_client_and_counted_down_however_they_end(core, monkeypatch, n):
    monkeypatch.setattr(quotas, "MAX_SAMPLES", 8)
    requests = [AddRequest(request(FLOODER, 5, number, n=n)) for number in range(9)]
    core.put(FLOODER, *requests)
    core.put(BYSTANDER, AddRequest(request(BYSTANDER)))
    core.run()
    refused = core.io.answers(Refused)
    assert [each.failure.kind for each in refused] == ["RequestError"] * (9 - 8 // n)
    assert "at most 8 samples of one client" in refused[0].failure.bound
    assert not core.io.answers(Refused, BYSTANDER)
    assert not core.proc._quotas._samples, "every sample has ended"


def test_calls_that_wait_are_bounded_for_each_client(core, monkeypatch):
    monkeypatch.setattr(quotas, "MAX_CALLS", 3)
    core.put(FLOODER, AddRequest(request(FLOODER, max_tokens=100)))
    drain = pack({"drain_timeout": 300.0})
    core.put(FLOODER, *[Call(number, "wait_for_requests_to_drain", *drain) for number in range(5)])
    core.put(BYSTANDER, Call(0, "wait_for_requests_to_drain", *drain))
    core.run()
    failures = [reply.failure for reply in core.io.answers(Reply) if reply.failure is not None]
    assert [failure.kind for failure in failures] == ["RequestError"] * 2
    assert "has 3 of 3" in failures[0].message
    assert len(core.io.answers(Reply)) == 5 and core.io.answers(Reply, BYSTANDER)[0].failure is None
    assert not core.proc._quotas._calls, "every call has ended"


def test_nothing_is_counted_of_a_client_that_has_left(core):
    core.put(FLOODER, AddRequest(request(FLOODER, max_tokens=1000, n=3)))
    core.put(FLOODER, Call(1, "wait_for_requests_to_drain", *pack({"drain_timeout": 300.0})))
    core.put(FLOODER, Cancel(2))
    core.io.cancelled.add((FLOODER, 2))  # as the socket does for what is still in the inbox
    core.io.gone.add(FLOODER)
    core.io.inbox.put(ClientLeft(FLOODER))
    core.run()
    assert not core.proc._quotas._samples and not core.proc._quotas._calls
    assert not core.io.cancelled and not core.io.gone
    assert core.core.stats.num_steps < 1000


def score_of(count):
    arguments = {"prompt_token_ids": [[5]] * count, "completion_token_ids": [[6]] * count, "temperature": 1.0}
    return Call(1, "score", *pack(arguments))


def test_a_long_score_of_one_client_leaves_the_steps_of_another_their_pace(core):
    pieces, score, seen = [], core.model.score, []

    def counted(*args):
        for found in score(*args):
            pieces.append(found)
            yield found

    core.model.score = counted
    core.put(FLOODER, score_of(200), score_of(200))
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=50, output_kind="delta")))
    core.io.on_send = lambda index, _: index == BYSTANDER and seen.append(len(pieces))
    core.run(is_over=lambda: len(core.io.answers(Reply)) == 2)
    assert len(seen) == 50 and max(after - before for before, after in itertools.pairwise(seen)) == 1
    assert len(pieces) == 400


@pytest.mark.slow
def test_a_score_ends_when_its_client_has_left(core):
    core.put(FLOODER, score_of(100_000))
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=20)))
    core.io.inbox.put(ClientLeft(FLOODER))
    core.run(is_over=lambda: not core.proc.driver.can_progress())
    assert core.core.stats.num_steps < 100 and not core.io.answers(Reply)


def test_a_drain_ends_what_is_in_flight_and_refuses_what_comes(core):
    core.put(FLOODER, AddRequest(request(FLOODER, max_tokens=50)), score_of(80))
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=20)))
    steps = itertools.count()

    def before_step():
        step = next(steps)
        if step == 3:
            core.io.inbox.put_first(Drain("it is told to end"))
        elif step == 9:
            core.put(BYSTANDER, AddRequest(request(BYSTANDER, number=1)))

    core.model.before_step = before_step
    assert core.proc.run() == core.io.draining == "it is told to end"
    ends = [end.finish_reason for _, message in core.io.sent if isinstance(message, Outputs)
            for step in message.steps for end in step.ended]  # fmt: skip
    assert ends == ["length", "length"]
    (refused,) = core.io.answers(Refused, BYSTANDER)
    assert refused.failure.kind == "RetryableError" and "about to end (it is told to end)" in refused.failure.message
    assert core.io.answers(Reply)[0].failure is None, "the score is complete"


@pytest.mark.parametrize("paused", [False, True])
def test_a_drain_has_a_deadline(core, monkeypatch, paused):
    monkeypatch.setattr(core_proc, "DRAIN_SECONDS", 0.1)
    core.put(FLOODER, AddRequest(request(FLOODER, max_tokens=4000, output_kind="delta")))
    if paused:
        core.put(FLOODER, Call(1, "pause_generation", *pack({"mode": "keep"})))

    def drain(*_):
        core.io.on_send = lambda *_: None
        core.io.inbox.put_first(Drain("it is told to end"))

    core.io.on_send = drain
    assert "1 requests were still in flight after 0.1 s" in core.proc.run()
    (outputs,) = core.io.answers(Outputs)[-1:]
    assert [(end.finish_reason, end.is_given_up) for end in outputs.steps[-1].ended] == [("abort", True)]


def test_health_is_answered_during_a_step_and_before_what_the_client_has_sent(core):
    def before_step():
        call = Call(len(core.io.answers(Reply)), "check_health", *pack({}))
        assert core.io.answer(FLOODER, call)
        core.model.before_step = lambda: None

    assert not core.io.answer(FLOODER, Call(1, "get_cache_usage", *pack({})))
    core.model.before_step = before_step
    core.put(BYSTANDER, AddRequest(request(BYSTANDER, max_tokens=3)))
    core.put(FLOODER, *[Abort([7])] * 100)
    core.run()
    (reply,) = core.io.answers(Reply)
    health = unpack(reply.result, reply.arrays, Health)
    assert (health.state, health.is_ready, health.num_unfinished_requests) == ("RUNNING", True, 1)
    assert health.busy_seconds > 0.0, "the step in progress"


@pytest.mark.parametrize(
    ("verb", "arguments", "state", "is_ready"),
    [("pause_generation", {"mode": "keep"}, "PAUSED", False), ("resume_generation", {}, "RUNNING", True)],
)
def test_health_tells_whether_requests_are_taken(core, verb, arguments, state, is_ready):
    core.put(FLOODER, Call(0, verb, *pack(arguments)))
    core.run()
    assert core.io.answer(FLOODER, Call(1, "check_health", *pack({})))
    core.proc.driver.is_ending = True
    assert core.io.answer(FLOODER, Call(2, "check_health", *pack({})))
    healths = [unpack(reply.result, reply.arrays, Health) for reply in core.io.answers(Reply)[1:]]
    assert [(each.state, each.is_ready) for each in healths] == [(state, is_ready), ("ENDING", False)]


def test_every_client_hears_of_a_version_before_what_is_sampled_under_it(core):
    driver, heard = core.proc.driver, []

    def commit(version):
        with driver.boundary():
            core.core.commit_version(version)

    def note(client_index, message):
        if isinstance(message, LiveVersion):
            heard.append((client_index, message.policy_version))
        elif isinstance(message, Outputs):
            heard.extend(step.policy_version for step in message.steps)
            if len(heard) == 3:
                threading.Thread(target=commit, args=[7]).start()

    core.io.on_send = note
    core.put(FLOODER, AddRequest(request(FLOODER, max_tokens=300, output_kind="delta")))
    core.run()
    assert heard.count((None, 7)) == 1
    told = heard.index((None, 7))
    assert set(heard[:told]) <= {0, 7} and set(heard[told + 1 :]) <= {0, 7} and heard[-1] == 7
    assert 7 not in heard[:told] and 0 in heard[:told]


def test_every_client_is_asked_to_forget_its_pictures_before_the_call_is_answered(core):
    core.put(FLOODER, Call(3, "reset_mm_cache", *pack({})))
    core.run()
    told = [(index, type(message)) for index, message in core.io.sent]
    assert told == [(None, ForgetPictures), (FLOODER, Reply)]
    assert core.core.stats.pictures is core.io.picture_stats
