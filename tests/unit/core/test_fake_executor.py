"""The fake must be strict: each kind of wrong block table raises."""

import pytest

from rollout_engine.base.messages import NewSequence, SampleTask, ScheduledSequence, SchedulerOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.fake_executor import FakeExecutor, FakeKVError, fake_next_token

PROMPT = [5, 6, 7, 8, 9]


def new(sequence_id=0, **params):
    return NewSequence(sequence_id, PROMPT.copy(), len(PROMPT), SamplingParams(**params), seed=3)


def work(*rows, step=0, version=0, new=(), copies=(), finished=(), samples=None):
    samples = [SampleTask(row.sequence_id, i) for i, row in enumerate(rows)] if samples is None else samples
    return SchedulerOutput(step, version, list(finished), list(new), list(copies), list(rows), samples)


def prefill(sequence_id=0, blocks=(0, 1), start=0, end=5):
    return ScheduledSequence(sequence_id, start, end - start, list(blocks))


@pytest.fixture
def fake():
    return FakeExecutor(block_size=4, vocab_size=50)


def test_tokens_are_a_function_of_context_and_seed_alone(fake):
    first = fake.execute(work(prefill(), new=[new()])).token_ids[0]
    second = fake.execute(work(prefill(start=5, end=6), step=1)).token_ids[0]
    assert [first, second] == [fake_next_token(PROMPT, 3, 50), fake_next_token([*PROMPT, first], 3, 50)]
    assert fake.num_tokens_computed == 6


def test_a_position_never_written_raises(fake):
    with pytest.raises(FakeKVError, match="position 0, which was never written"):
        fake.execute(work(prefill(start=2), new=[new()]))


def test_kv_of_another_context_raises(fake):
    other = NewSequence(1, [1, 2, 3, 4, 9], 5, SamplingParams(), seed=3)
    fake.execute(work(prefill(), new=[new()]))
    with pytest.raises(FakeKVError, match="1 reads KV of another context at position 0"):
        fake.execute(work(prefill(1, start=4), new=[other], step=1))


def test_two_sequences_writing_one_slot_raise(fake):
    with pytest.raises(FakeKVError, match="same KV slot"):
        fake.execute(work(prefill(), prefill(1, blocks=(2, 1)), new=[new(), new(1)]))


def test_a_missing_block_raises(fake):
    with pytest.raises(FakeKVError, match="no block for position 4"):
        fake.execute(work(prefill(blocks=(0,)), new=[new()]))


def test_sampling_before_the_context_is_complete_raises(fake):
    with pytest.raises(FakeKVError, match="samples after 4"):
        fake.execute(work(prefill(end=4), new=[new()]))


def test_a_sequence_introduced_twice_raises(fake):
    fake.execute(work(prefill(), new=[new()]))
    with pytest.raises(FakeKVError, match="already known"):
        fake.execute(work(prefill(), new=[new()], step=1))


@pytest.mark.parametrize("copies", [[(0, 3), (3, 4)], [(0, 3), (1, 3)]])
def test_copies_that_depend_on_their_order_raise(fake, copies):
    with pytest.raises(FakeKVError, match="order"):
        fake.execute(work(copies=copies))


def test_a_copied_block_carries_its_context(fake):
    fake.execute(work(prefill(), new=[new()]))
    token = fake.execute(work(prefill(1, blocks=(0, 2), start=5, end=5), new=[new(1)], copies=[(1, 2)], step=1))
    assert token.token_ids == [fake_next_token(PROMPT, 3, 50)]


def test_the_oldest_version_attended_is_reported(fake):
    fake.execute(work(prefill(), new=[new()], version=4))
    fake.execute(work(prefill(start=5, end=6), version=6, step=1))
    assert fake.kv_min_versions == {0: 4}


def test_it_fails_scripts_and_errs_as_told():
    fake = FakeExecutor(block_size=4, vocab_size=50, fail_at_steps={1}, scripts={0: [2]}, errors={1: "NaN logits"})
    output = fake.execute(work(prefill(), prefill(1, blocks=(2, 3)), new=[new(), new(1)]))
    assert (output.token_ids, output.errors) == ([2, -1], {1: "NaN logits"})
    with pytest.raises(RuntimeError, match="told to fail at step 1"):
        fake.execute(work(prefill(start=5, end=6), step=1))


def test_columns_come_only_where_asked(fake):
    asked = fake.execute(work(prefill(), new=[new(logprobs=2, top_k=3)]))
    token = asked.token_ids[0]
    assert asked.logprobs == [-1.0 - token / 50] and asked.kept_logprob_mass == [-0.125]
    assert asked.top_logprobs[0].tolist() == [[token, (token + 1) % 50]]
    plain = fake.execute(work(prefill(1, blocks=(2, 3)), new=[new(1)], step=1))
    assert (plain.logprobs, plain.kept_logprob_mass, plain.top_logprobs) == (None, None, None)


def test_finished_sequences_are_forgotten_and_unknown_ones_ignored(fake):
    fake.execute(work(prefill(), new=[new()]))
    assert fake.execute(work(finished=[0, 99], step=1)).token_ids == []
    assert fake.sequences == {}
