"""Routed experts that requests return: those of the trainer's own forward, whatever else the engine did meanwhile."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, EngineConfig, LLMEngine, RequestError, SamplingParams, exact
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.routers import recording, routers_of

PROMPTS = [list(range(3, 100)), list(range(3, 110)), [5, 6]]
EXACT = ["qwen3_moe", "mixtral", "gemma4_text_experts"]
OTHERS = ["deepseek_v3_eight_groups", "gpt_oss", "longcat_flash", "phimoe"]
"""Exact too; each has another router."""


@pytest.fixture(scope="module", params=EXACT + [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def directory(request, sized_checkpoint):
    return sized_checkpoint(request.param)


def trainer_of(directory):
    return exact.enable(AutoModelForCausalLM.from_pretrained(directory))


def truth(trainer, token_ids):
    """The experts of all tokens but the last by the trainer's forward."""
    with recording(routers_of(trainer)) as chosen, torch.no_grad():
        trainer(torch.tensor([token_ids]))
    return torch.stack(chosen, 1).numpy()[:-1]


def ask(llm, prompts=PROMPTS, **params):
    params = dict(max_tokens=24, ignore_eos=True, return_routed_experts=True) | params
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def assert_true(trainer, outputs):
    for output in outputs:
        for sample in output.outputs:
            expected = truth(trainer, output.prompt_token_ids + sample.token_ids)
            assert sample.routed_experts.dtype == np.uint8
            assert np.array_equal(sample.routed_experts, expected)


@pytest.mark.quick(1)
def test_they_are_the_trainers_over_chunks_prefix_hits_and_preemption(directory):
    trainer = trainer_of(directory)
    with LLM(str(directory), log_stats=False, max_num_batched_tokens=33, num_kv_blocks=25) as llm:
        outputs = ask(llm, n=3, max_tokens=40)
        counters = llm.get_metrics().core.counters
        assert counters.num_preemptions and counters.num_cached_tokens and counters.num_block_copies
        assert_true(trainer, outputs)
        (output,) = ask(llm, PROMPTS[:1])
        turn = PROMPTS[0] + output.outputs[0].token_ids + [7, 8]
        (output,) = ask(llm, [turn])
        assert output.num_cached_tokens > len(PROMPTS[0])
        assert_true(trainer, [output])


@pytest.mark.quick(1)
def test_drafted_tokens_have_the_experts_that_they_have_without(directory):
    with LLM(str(directory), log_stats=False, speculation=SpeculationConfig()) as llm:
        core = llm.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        same = dict(n=4, temperature=0.1, max_tokens=60, seed=3)
        outputs = [output for _ in range(2) for output in ask(llm, [PROMPTS[2] * 3], **same)]
        assert sum(core.stats.drafts.num_accepted) > 0 < sum(core.stats.drafts.num_drafted)
    assert_true(trainer_of(directory), outputs)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_before_an_update_keep_the_experts_of_the_version_that_made_them(directory, kv):
    before, after = trainer_of(directory), trainer_of(directory)
    with torch.no_grad():
        for router in routers_of(after):
            next(parameter for parameter in router.parameters() if parameter.dim() == 2).neg_()
    engine = LLMEngine.from_config(EngineConfig(model=str(directory), log_stats=False))
    params = SamplingParams(max_tokens=16, ignore_eos=True, return_routed_experts=True)
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, params)
    outputs = [output for _ in range(6) for output in engine.step()]
    engine.update_weights(after, kv=kv)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.shutdown()
    sample = outputs[-1].outputs[0]
    token_ids, first = PROMPTS[0] + sample.token_ids, sample.version_spans[0].end
    assert [span.policy_version for span in sample.version_spans] == [0, 1] and 0 < first < 16
    num_old = len(PROMPTS[0]) - 1 + first  # tokens behind which version 0 sampled
    assert np.array_equal(sample.routed_experts[:num_old], truth(before, token_ids)[:num_old])
    if kv == "recompute":
        assert np.array_equal(sample.routed_experts[num_old:], truth(after, token_ids)[num_old:])
    assert not np.array_equal(sample.routed_experts[num_old:], truth(before, token_ids)[num_old:])


def test_a_dense_model_refuses_to_return_them(checkpoint):
    with LLM(str(checkpoint("qwen3")), log_stats=False) as llm:
        with pytest.raises(RequestError, match="return_routed_experts=True is not allowed: must be False.*no routers"):
            ask(llm)


def test_steps_in_which_nobody_asks_record_nothing(directory, monkeypatch):
    def refuse(model):
        raise AssertionError("it records")

    with LLM(str(directory), log_stats=False) as llm:
        monkeypatch.setattr(CpuModel, "recording", refuse)
        (output,) = ask(llm, [PROMPTS[2]], return_routed_experts=False)
        assert (output.outputs[0].finish_reason, output.outputs[0].routed_experts) == ("length", None)
        (output,) = ask(llm, [PROMPTS[2]])
        assert "it records" in output.outputs[0].error
