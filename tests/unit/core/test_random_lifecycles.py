"""Any order of verbs: every request ends once, with its own tokens, and nothing leaks."""

import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError
from rollout_engine.core.lifecycle import MODES, State

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 24, 4, 23
PROMPTS = [[(7 * i * i + salt) % VOCAB_SIZE for i in range(30)] for salt in range(2)]
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.fixed_dictionaries(
            dict(
                max_tokens=st.integers(1, 40),
                n=st.sampled_from([1, 1, 2, 3]),
                priority=st.sampled_from([0, 0, -1]),
                eos=st.sampled_from([[], [], [3]]),
            )
        ),
    ),
    max_size=3,
)
"""(prompt length, fields) each."""
MAX_STEPS = 2_000
BEFORE = st.tuples(REQUESTS, st.integers(0, 6), st.sampled_from([False] * 15 + [True]))
"""What is added, how many steps are taken, and whether the first of them fails."""


class Lifecycles(RuleBasedStateMachine):
    """The rig checks every output against the slow truth; this chooses the verbs."""

    def __init__(self, make_rig, num_state_slots):
        super().__init__()
        sizes = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4, vocab_size=VOCAB_SIZE)
        self.rig = make_rig(**sizes, num_state_slots=num_state_slots, state_interval=2 * BLOCK_SIZE)
        self.num_added = 0

    @property
    def lifecycle(self):
        return self.rig.core.lifecycle

    @property
    def live(self):
        return sorted(key for key in self.rig.tokens if key not in self.rig.ends)

    def prepare(self, requests, count, fails):
        """So that verbs find something in flight."""
        self.add(requests)
        if fails:
            self.rig.fail_at_steps.add(self.rig.next_step)
        self.step(count)

    def add(self, requests):
        for length, fields in requests:
            name = f"r{self.num_added}"
            try:
                self.rig.add(name, PROMPTS[self.num_added % 2][:length], seed=self.num_added, **fields)
            except DirtyWeightsError:
                assert self.lifecycle.dirty
            else:
                self.num_added += 1

    @rule(count=st.integers(1, 20))
    def step(self, count):
        for _ in range(count):
            could = self.lifecycle.can_step or bool(self.rig.core._results.pending_outputs)
            said = self.rig.step()
            assert could or not any(each.new_token_ids for each in said)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole):
        request_id, index = data.draw(st.sampled_from(self.live))
        self.rig.abort(request_id if whole else f"{index}_{request_id}")

    @rule(mode=st.sampled_from(MODES), clear_cache=st.booleans(), before=BEFORE)
    def pause(self, mode, clear_cache, before):
        self.prepare(*before)
        with self.or_refused():
            self.rig.pause(mode, clear_cache=clear_cache)
            assert self.lifecycle.paused == mode

    @rule(before=BEFORE)
    def resume(self, before):
        self.prepare(*before)
        with self.or_refused():
            self.rig.resume()
            assert self.lifecycle.paused is None

    @rule(level=st.sampled_from([0, 1, 2]), mode=st.sampled_from(MODES), before=BEFORE)
    def sleep(self, level, mode, before):
        self.prepare(*before)
        with self.or_refused():
            self.rig.sleep(level, mode)
            assert self.lifecycle.asleep or self.lifecycle.draining

    @rule(tags=st.sampled_from([None, None, ["weights"], ["kv_cache"], ["scheduling"]]), before=BEFORE)
    def wake_up(self, tags, before):
        self.prepare(*before)
        with self.or_refused():
            self.rig.wake_up(tags)
            assert not self.lifecycle.asleep & set(tags or ("weights", "kv_cache", "scheduling"))

    @rule(kv=st.sampled_from(["keep", "recompute"]), breaks_off=st.sampled_from([False, False, True]), before=BEFORE)
    def update(self, kv, breaks_off, before):
        self.prepare(*before)
        with self.or_refused():
            self.rig.update(kv=kv, breaks_off=breaks_off)
            assert self.lifecycle.dirty == breaks_off

    @rule(running_too=st.booleans(), before=BEFORE)
    def reset_prefix_cache(self, running_too, before):
        self.prepare(*before)
        self.rig.core.quiesce()
        held = self.rig.core.cache_usage() > 0
        assert self.rig.core.reset_prefix_cache(reset_running_requests=running_too) == (running_too or not held)
        if running_too:
            assert self.rig.core.cache_usage() == 0

    @invariant()
    def the_books_agree(self):
        self.rig.core.check_integrity()
        assert not self.lifecycle.asleep - {"scheduling"} or self.rig.core.cache_usage() == 0

    def teardown(self):
        self.rig.fail_at_steps.clear()
        for _ in range(MAX_STEPS):
            if self.lifecycle.draining:
                self.rig.step()
        assert not self.lifecycle.draining, f"{self.live} have not ended after {MAX_STEPS} steps"
        self.rig.wake_up()
        if self.lifecycle.dirty:
            self.rig.update()
        self.rig.resume()
        assert self.lifecycle.state is State.RUNNING
        self.rig.run()
        self.rig.assert_clean()

    @contextlib.contextmanager
    def or_refused(self):
        """A refused verb leaves the lifecycle as it was."""
        before = {name: str(value) for name, value in vars(self.lifecycle).items()}
        try:
            yield
        except LifecycleError:
            assert {name: str(value) for name, value in vars(self.lifecycle).items()} == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_state_slots", [0, 5, 12])
def test_any_order_of_verbs_ends_every_request_once_and_leaks_nothing(make_rig, some_of, num_state_slots):
    chosen = settings(
        max_examples=some_of(30), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(lambda: Lifecycles(make_rig, num_state_slots), settings=chosen)
