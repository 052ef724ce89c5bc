"""What steps brought, on its way to the clients."""

import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.process.output_batcher import HOLD_SECONDS, OutputBatcher

OTHER = 1 << 40
"""First sequence of the second client."""


@pytest.fixture
def sent():
    """(client, sequences of each step) of every message."""
    return []


@pytest.fixture
def now():
    """Seconds: time passes when a test says so."""
    return [0.0]


@pytest.fixture
def out(sent, now):
    def send(client_index, message):
        sent.append((client_index, [step.sequence_ids for step in message.steps]))

    return OutputBatcher(send, lambda: now[0])


def step(*sequences, ended=()):
    ends = [SequenceEnd(sequence, "length") for sequence in ended]
    return EngineCoreOutputs(0, list(sequences), [5] * len(sequences), [0] * len(sequences), ended=ends)


def request(first, **params):
    params = SamplingParams(**params)
    return EngineCoreRequest(prompt_token_ids=[1], params=params, max_tokens=9, seed=0, first_sequence_id=first)


def test_steps_that_nobody_reads_leave_in_one_message_with_the_end(out, sent):
    out.watch(request(0, n=2, output_kind="final_only"))
    out.deliver(step(0, 1))
    out.deliver(step(0, 1))
    assert sent == []
    out.deliver(step(0, 1, ended=[1]))
    assert sent == [(0, [[0, 1]] * 3)]


@pytest.mark.parametrize(
    "params", [{"output_kind": "delta"}, {"output_kind": "cumulative"}, {"output_kind": "final_only", "stop": ["x"]}]
)
def test_a_step_that_somebody_reads_leaves_at_once(params, out, sent):
    out.watch(request(0, n=2, **params))
    out.deliver(step(1))
    out.deliver(step(1, 0))
    assert sent == [(0, [[1]]), (0, [[1, 0]])]


def test_an_ended_sequence_is_watched_no_more(out, sent):
    out.watch(request(0, output_kind="delta"))
    out.deliver(step(0, ended=[0]))
    out.watch(request(0, output_kind="final_only"))
    out.deliver(step(0))
    assert len(sent) == 1


def test_nothing_is_held_for_long(out, sent, now):
    out.deliver(step(0))
    now[0] += HOLD_SECONDS
    out.deliver(step(0))
    assert sent == [(0, [[0], [0]])]


def test_flush_sends_what_is_held_to_each_client_once(out, sent):
    out.deliver(step(0, OTHER))
    out.deliver(step(OTHER))
    out.flush()
    out.flush()
    assert sent == [(0, [[0]]), (1, [[OTHER], [OTHER]])]


def test_a_client_that_left_gets_nothing_more(out, sent):
    out.deliver(step(0))
    out.forget(0)
    out.flush()
    assert sent == []


def test_a_step_without_news_is_no_message(out, sent):
    out.deliver(step())
    out.flush()
    assert sent == []
