"""The fake must be strict: each kind of wrong block table raises."""

import pytest

from rollout_engine.base.messages import NewSequence, SampleTask, ScheduledSequence, SchedulerOutput, StateMove
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.fake_executor import FakeExecutor, fake_next_token
from rollout_engine.core.fake_states import FakeKVError

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


# States


@pytest.fixture
def fake_with_states():
    return FakeExecutor(block_size=4, vocab_size=50, num_state_slots=6)


def with_state(row, source, slot, *others):
    row.state = StateMove(source, slot, list(others))
    return row


def test_a_state_is_read_where_it_was_written(fake_with_states):
    first = with_state(prefill(end=4), -1, 0, (2, 1), (3, 2))
    fake_with_states.execute(work(first, new=[new()], samples=[]))
    fake_with_states.execute(work(with_state(prefill(start=2, end=4), 1, 3), step=1, samples=[]))
    fake_with_states.execute(work(prefill(start=4), step=2))
    assert fake_with_states.num_tokens_computed == 7


@pytest.mark.parametrize(
    "start, source, message",
    [(4, 1, "state of another context in slot 1"), (4, -1, "another context in slot -1"), (4, 5, "never written")],
)
def test_a_wrong_state_raises(fake_with_states, start, source, message):
    fake_with_states.execute(work(with_state(prefill(end=4), -1, 0, (2, 1)), new=[new()], samples=[]))
    with pytest.raises(FakeKVError, match=message):
        fake_with_states.execute(work(with_state(prefill(start=start), source, 2), step=1))


def test_a_state_of_another_version_than_the_kv_raises(fake_with_states):
    fake_with_states.execute(work(with_state(prefill(end=4), -1, 0), new=[new()], samples=[], version=1))
    fake_with_states.execute(work(with_state(prefill(end=4), -1, 1), samples=[], version=2, step=1))
    with pytest.raises(FakeKVError, match="state is of version 1, its KV of 2"):
        fake_with_states.execute(work(with_state(prefill(start=4), 0, 2), version=2, step=2))


def test_moves_that_contradict_one_another_raise(fake_with_states):
    both = dict(new=[new(), new(1)])
    for one, other, message in (
        ((-1, 0), (-1, 0), r"\[0\] are written twice"),
        ((-1, 0, (2, 0)), (-1, 1), r"\[0\] are written twice"),
        ((-1, 0), (0, 1), "slot 0 is read by one row and written by another"),
        ((-1, 6), (-1, 1), "leaves the pool of 6"),
        ((-1, 0, (2, -1)), (-1, 1), "leaves the pool of 6"),
        ((-1, 0, (5, 1)), (-1, 2), r"behind tokens \[5, 5\], which do not rise"),
        ((-1, 0, (3, 1), (2, 3)), (-1, 2), r"behind tokens \[3, 2, 5\], which do not rise"),
    ):
        rows = with_state(prefill(), *one), with_state(prefill(1, blocks=(2, 3)), *other)
        with pytest.raises(FakeKVError, match=message):
            fake_with_states.execute(work(*rows, **both, finished=[0, 1]))


def test_a_sequence_goes_on_in_its_own_slot_until_it_is_released(fake_with_states):
    fake_with_states.execute(work(with_state(prefill(end=4), -1, 0), new=[new()], samples=[]))
    with pytest.raises(FakeKVError, match="is to continue in its state slot, but it has none"):
        fake_with_states.execute(work(prefill(start=4), new=[new()], finished=[0], step=1))


def test_a_move_for_a_model_that_keeps_no_states_raises(fake):
    with pytest.raises(FakeKVError, match="keeps none"):
        fake.execute(work(with_state(prefill(), -1, 0), new=[new()]))
