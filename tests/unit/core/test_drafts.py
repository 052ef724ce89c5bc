"""Where drafts come from, and when they pay."""

import pytest

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.core.draft_choice import RightRates, StepCosts
from rollout_engine.core.draft_index import DraftIndex, prompt_key
from rollout_engine.core.drafts import MAX_MATCH, Draft, PromptDrafts
from rollout_engine.core.request import Request
from rollout_engine.core.speculation import source_of

PROMPT = list(range(100, 110))


def make_request(prompt=PROMPT, salt="", **params):
    params = SamplingParams(**params)
    sizes = dict(max_tokens=64, seed=0, first_sequence_id=0)
    return Request(EngineCoreRequest(prompt_token_ids=prompt, params=params, cache_salt=salt, **sizes), arrival=0)


def ended(output, **request):
    sequence = make_request(**request).leader
    sequence.token_ids = sequence.token_ids + output
    return sequence


def follows(drafts, tokens, **options):
    place = drafts.find(tokens, **options)
    return None if place is None else drafts.runs[place.run][place.at :]


def test_what_followed_the_same_three_tokens_is_the_draft():
    drafts = PromptDrafts(b"", PROMPT)
    drafts.index(drafts.add([1, 2, 3, 4, 5, 6]), 0)
    assert follows(drafts, [9, 9, 2, 3, 4]) == [5, 6]
    assert follows(drafts, PROMPT[:4]) == PROMPT[4:]
    assert follows(drafts, [2, 3, 9]) is None
    assert follows(drafts, [3, 4]) is None


def test_the_place_with_most_agreeing_tokens_wins_and_of_those_the_newest():
    drafts = PromptDrafts(b"", PROMPT)
    for run in ([7, 1, 2, 3, 20], [8, 1, 2, 3, 21], [1, 2, 3, 22]):
        drafts.index(drafts.add(run), 0)
    assert follows(drafts, [7, 1, 2, 3]) == [20]
    assert follows(drafts, [8, 1, 2, 3]) == [21]
    assert follows(drafts, [9, 1, 2, 3]) == [22]
    assert drafts.find([5] * 40 + [8, 1, 2, 3]).num_matched == 4


def test_agreement_is_counted_up_to_a_bound():
    drafts = PromptDrafts(b"", PROMPT)
    long = list(range(1, 60))
    drafts.index(drafts.add(long), 0)
    assert drafts.find(long[:50]).num_matched == MAX_MATCH


def test_a_run_that_grows_is_found_to_its_end_and_not_behind_it():
    drafts = PromptDrafts(b"", PROMPT)
    run = [1, 2, 3]
    own = drafts.add(run)
    drafts.index(own, 0)
    assert follows(drafts, [1, 2, 3]) is None
    run += [4, 5]
    drafts.index(own, 3)
    assert follows(drafts, [1, 2, 3]) == [4, 5]
    assert follows(drafts, [1, 2, 3], left_out=(own,)) is None


def test_finished_samples_come_back_for_their_prompt_and_salt_alone():
    index = DraftIndex(max_rollout_tokens=1000)
    index.keep(ended([1, 2, 3, 4]))
    for request, expected in (
        (make_request(), [1, 2, 3, 4]),
        (make_request(salt="tenant"), None),
        (make_request(prompt=[5, *PROMPT[1:]]), None),
    ):
        drafts = index.open(request, shared=True)
        assert follows(drafts, request.leader.token_ids) == expected
        index.close(drafts)


def test_sequences_of_a_prompt_share_its_drafts_while_one_lives():
    index = DraftIndex(max_rollout_tokens=1000)
    first, second = (index.open(make_request(), shared=True) for _ in range(2))
    assert first is second
    assert index.open(make_request(), shared=False) is not first
    index.close(first)
    assert index.open(make_request(), shared=True) is first
    index.close(first)
    index.close(first)
    assert index.open(make_request(), shared=True) is not first


def test_memory_is_bounded_and_the_prompt_seen_longest_ago_is_forgotten_first():
    index = DraftIndex(max_rollout_tokens=21)
    for prompt in ([1, 1, 1], [2, 2, 2], [1, 1, 1], [3, 3, 3]):
        index.keep(ended([4, 5, 6, 7], prompt=prompt))
    assert [key for key, _ in index.list_prompts()] == [prompt_key([n, n, n]) for n in (2, 1, 3)]
    index.keep(ended([4, 5, 6, 7], prompt=[4, 4, 4]))
    assert index.num_kept_tokens == sum(len(run) for _, runs in index.list_prompts() for run in runs) <= 21
    assert prompt_key([2, 2, 2]) not in dict(index.list_prompts())


def test_of_one_prompt_the_newest_samples_are_kept():
    index = DraftIndex(max_rollout_tokens=10_000)
    for number in range(40):
        index.keep(ended([number, number + 1]))
    ((_, runs),) = index.list_prompts()
    assert [run[-2] for run in runs] == list(range(24, 40))


def test_equal_samples_are_kept_once_and_count_as_new():
    index = DraftIndex(max_rollout_tokens=10_000)
    for number in (1, 2, 1):
        index.keep(ended([number, number + 1]))
    ((_, runs),) = index.list_prompts()
    assert [run[-2] for run in runs] == [2, 1]
    assert index.num_kept_tokens == sum(map(len, runs))


def test_costs_lie_on_lines_between_what_was_measured():
    costs = StepCosts([(1, 1.0), (4, 1.0), (8, 3.0)])
    assert [costs.of(rows) for rows in (1, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0]


def test_rates_follow_what_is_seen():
    rates = RightRates(5)
    assert rates.of(3) == 0.5
    for _ in range(200):
        rates.learn(3, True)
    assert rates.of(3) > 0.95
    assert rates.of(4) == rates.of(2) == 0.5
    for _ in range(300):
        rates.learn(3, False)
    assert rates.of(3) < 0.05


@pytest.fixture
def draft_by_costs(make_rig):
    """draft_by_costs(step_seconds) -> what is drafted for samples that repeat earlier ones, or do not."""

    def draft(step_seconds, *, repeats=True, num=1, drafted=()):
        costs = {"step_seconds": step_seconds, "drafted_step_seconds": drafted}
        rig = make_rig(speculation=SpeculationConfig(), **costs, max_num_seqs=32)
        if rig.config.async_scheduling:
            pytest.skip("nothing is drafted behind a step in flight")
        for round_ in range(2):
            for sample in range(num):
                rig.add(f"{round_} {sample}", [7, 8, 9, sample], max_tokens=40, seed=0 if repeats else round_)
            rig.run()
        rig.assert_clean()
        return rig.core.stats.drafts

    return draft


def test_drafts_are_added_where_rows_are_cheap(draft_by_costs):
    drafts = draft_by_costs(((1, 1.0), (64, 1.2)))
    assert sum(drafts.num_accepted) > 25
    assert len(drafts.num_drafted) == SpeculationConfig().max_draft_tokens

    assert drafts.drafted_by_source == {"rollouts": sum(drafts.num_drafted)}
    assert drafts.accepted_by_source == {"rollouts": sum(drafts.num_accepted)}


@pytest.mark.parametrize(("run", "source"), [(0, "ngram"), (2, "ngram"), (1, "rollouts"), (3, "rollouts")])
def test_a_draft_from_the_prompt_or_the_sample_itself_counts_as_ngram(run, source):
    sequence = ended([1, 2, 3, 4])
    sequence.draft = Draft(PromptDrafts(b"", PROMPT), own_run=2, num_seen=4, run=run)
    assert source_of(sequence) == source


def test_nothing_is_drafted_where_rows_cost_what_they_bring(draft_by_costs):
    assert draft_by_costs(((1, 1.0), (2, 2.0))).num_drafted == []


def test_steps_with_drafts_may_cost_more_than_others(draft_by_costs):
    """As on a device, where they have no graph."""
    plain = ((1, 1.0), (64, 1.2))
    assert draft_by_costs(plain, drafted=((2, 12.0), (64, 12.2))).num_drafted == []
    assert sum(draft_by_costs(plain, drafted=((2, 2.0), (64, 2.2))).num_accepted) > 25


def test_drafts_that_are_never_right_end(draft_by_costs):
    drafts = draft_by_costs(((1, 1.0), (64, 64.0 / 4)), repeats=False, num=16)
    assert sum(drafts.num_drafted) < 64
