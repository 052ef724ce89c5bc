"""Drafted tokens on a device: the same tokens and the same log-probs, to the bit, as one token in a step."""

import pytest

from rollout_engine import SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.execution.step_costs import measure_steps
from rollout_engine.model.cuda.largest_step import run_largest_step
from rollout_engine.model.cuda.sampler import CudaSampler
from rollout_engine.testing import tiny_model
from tests.parity.test_speculation import describe

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)

PROMPTS = [{"prompt_token_ids": [7, 8, 9, 7, 8]}, {"prompt_token_ids": list(range(40, 62))}]
SHORT = dict(max_tokens=6, ignore_eos=True, seed=3)
PARAMS = {
    "drawn": SamplingParams(temperature=0.8, logprobs=0, n=2, **SHORT),
    "truncated": SamplingParams(temperature=0.8, top_p=0.9, logprobs=2, **SHORT),
    "edited": SamplingParams(temperature=0.7, presence_penalty=1.0, logit_bias={7: 4.0}, logprobs=0, **SHORT),
    "held back": SamplingParams(temperature=0.7, min_tokens=3, logprobs=0, n=2, max_tokens=6, seed=3),
    "processed": SamplingParams(temperature=0.6, min_p=0.02, logprobs=2, logprobs_mode="processed", **SHORT),
    "raw": SamplingParams(temperature=1.5, logprobs=1, logprobs_mode="raw", **SHORT),
    "greedy": SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, **SHORT),
}


@pytest.fixture
def llm(engine_on):
    """An engine on a device that drafts wherever it has a draft."""
    speculation = SpeculationConfig(max_draft_tokens=3)
    llm = engine_on("device", deterministic=True, async_scheduling=False, speculation=speculation, max_num_seqs=2)
    costs = core_of(llm)._scheduler.speculator._costs
    costs.of = costs.with_drafts = lambda num_rows: 1.0  # every draft pays
    return llm


def core_of(llm):
    return llm.frontend.client.driver.core


def run(llm, params, prompts):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(describe(sample), str(output.prompt_logprobs)) for output in outputs for sample in output.outputs]


def compare(llm, params, prompts):
    off = [each.clone(speculation=False) for each in params]
    expected = run(llm, off, prompts)
    drafts = core_of(llm).stats.drafts
    before = sum(drafts.num_accepted)
    for _ in range(2):  # the second time the first has what is to be drafted
        assert run(llm, params, prompts) == expected
    assert sum(drafts.num_accepted) > before


@pytest.mark.slow
def test_no_bit_depends_on_drafts(llm):
    edited = SamplingParams(temperature=0.7, presence_penalty=1.0, logprobs=0, max_tokens=4, ignore_eos=True, seed=3)
    compare(llm, [edited, edited.clone(presence_penalty=0.0)], PROMPTS[:1] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARAMS)
def test_no_bit_depends_on_drafts_whatever_is_asked_for(llm, kind):
    compare(llm, [PARAMS[kind]] * len(PROMPTS), PROMPTS)


@pytest.mark.slow
def test_steps_with_drafts_have_costs_of_their_own(llm):
    info = llm.frontend.client.info
    assert info.step_seconds[0][0] == 1 and info.drafted_step_seconds[0][0] == 2


@pytest.mark.slow
def test_the_largest_step_has_the_logits_of_drafts(llm):
    model = llm.frontend.client.driver.executor.worker.runner.model
    with pytest.MonkeyPatch.context() as patch:
        drawn = []
        patch.setattr(CudaSampler, "draw", lambda self, logits, *rest: drawn.append(len(logits)))
        for num_drafted in (0, 3, 100):
            run_largest_step(model, 259, num_drafted)
    llm.reset_prefix_cache()
    assert drawn == [2, 8, 16]  # as many as the step has tokens


def test_costs_of_drafts_are_of_steps_with_drafts():
    seen = []
    costs = measure_steps(lambda work: seen.append(work), 9, num_drafted=1)
    assert [rows for rows, _ in costs] == [2, 4, 8]
    timed = [work for work in seen if work.scheduled and not work.new]
    for work in timed:
        assert all(each.num_scheduled_tokens == 2 and each.draft_token_ids == [0] for each in work.scheduled)
    assert {len(work.samples) for work in timed} == {1, 2, 4}


@pytest.fixture
def llm_with_draft_model(engine_on, checkpoints):
    """An engine on a device whose draft model is its policy, and always seems to pay."""
    speculation = SpeculationConfig(sources=(), draft_model=str(checkpoints("qwen3")), max_draft_tokens=3)
    llm = engine_on("device", deterministic=True, async_scheduling=False, speculation=speculation, max_num_seqs=4)
    core = core_of(llm)
    for costs, seconds in (core.draft_model._costs, 1.0), (core.draft_model._draft_costs, 1e-6):
        costs.of = costs.with_drafts = lambda num_rows, seconds=seconds: seconds
    costs = core._scheduler.speculator._costs
    costs.of = costs.with_drafts = lambda num_rows: 1.0
    return llm


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drawn", "truncated", "edited", "greedy"])
def test_no_bit_depends_on_drafts_of_a_model(llm_with_draft_model, kind):
    """Samples of one prompt begin with copies of its KV; a sequence is introduced anew in each round."""
    llm, params = llm_with_draft_model, [PARAMS[kind]] * len(PROMPTS)
    drafts, expected = core_of(llm).stats.drafts, run(llm, [each.clone(speculation=False) for each in params], PROMPTS)
    before = sum(drafts.num_accepted), sum(drafts.num_drafted)
    assert run(llm, params, PROMPTS) == expected
    accepted, drafted = sum(drafts.num_accepted) - before[0], sum(drafts.num_drafted) - before[1]
    assert accepted > 0.8 * drafted > 0
    core_of(llm).draft_model._model.check_integrity()


@pytest.mark.slow
def test_a_draft_model_takes_weights_and_sleeps(llm_with_draft_model):
    llm, params = llm_with_draft_model, [PARAMS["drawn"]] * len(PROMPTS)
    expected = run(llm, params, PROMPTS)
    digest = llm.collective_rpc("get_weight_digest")
    llm.update_weights(tiny_model("qwen3", seed=9), draft=True)
    assert run(llm, params, PROMPTS) == expected and llm.collective_rpc("get_weight_digest") == digest
    llm.sleep(level=1)
    llm.wake_up()
    assert run(llm, params, PROMPTS) == expected
    assert llm.collective_rpc("get_memory_usage")[0]["draft_model"] > 0
    llm.update_weights(tiny_model("qwen3"), draft=True)
    drafts = core_of(llm).stats.drafts
    before = sum(drafts.num_accepted), sum(drafts.num_drafted)
    assert run(llm, params, PROMPTS) == expected
    assert sum(drafts.num_accepted) - before[0] > 0.8 * (sum(drafts.num_drafted) - before[1]) > 0
