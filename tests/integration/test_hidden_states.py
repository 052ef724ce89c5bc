"""Hidden states of sampled tokens and of prompts: those behind which the tokens were drawn, in the model's values."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, AsyncLLM, RolloutPolicy, SamplingParams, concat, exact
from rollout_engine.base import hidden_states
from rollout_engine.base.errors import RequestError
from rollout_engine.testing import tiny_checkpoint

PROMPTS = [list(range(5, 12)), list(range(20, 110))]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, seed=4, logprobs=0, return_hidden_states="all")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, dtype):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=getattr(torch, dtype))


@pytest.fixture(scope="module", params=["compiled", "modules"])
def llm(request, checkpoint, dtype):
    options = dict(max_num_batched_tokens=40, speculation="auto")  # a prompt takes several steps
    with LLM(checkpoint, dtype=dtype, max_model_len=256, **options) as llm:
        if request.param == "modules":
            llm.llm_engine.frontend.client.driver.executor.worker.runner.model.decoder = None
        yield llm


@pytest.fixture(scope="module")
def trainer(checkpoint, dtype):
    return exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)))


def states_of(trainer, token_ids):
    """float32 [n, H], of the trainer's own forward."""
    with torch.no_grad():
        return trainer.base_model(torch.tensor([token_ids])).last_hidden_state[0].float().numpy()


@pytest.mark.quick(1)
def test_states_are_those_of_the_trainer_at_the_positions_before(llm, trainer):
    for output in llm.generate(PROMPTS, PARAMS.clone(n=2), use_tqdm=False):
        prompt = output.prompt_token_ids
        for sample in output.outputs:
            expected = states_of(trainer, prompt + sample.token_ids)
            assert np.array_equal(output.prompt_hidden_states, expected[: len(prompt)])
            assert sample.hidden_states.dtype == np.float32
            assert np.array_equal(sample.hidden_states, expected[len(prompt) - 1 : -1])
            logits = trainer.lm_head(torch.from_numpy(sample.hidden_states).to(trainer.dtype)).float()
            chosen = logits.log_softmax(-1)[range(6), sample.token_ids]
            np.testing.assert_allclose(chosen.detach(), sample.logprobs, atol=2e-2)


def test_only_those_who_ask_have_states_and_a_stream_has_what_is_new(llm):
    asked = [PARAMS, PARAMS.clone(return_hidden_states="sampled"), PARAMS.clone(return_hidden_states=None)]
    every, sampled, none = llm.generate([PROMPTS[1]] * 3, asked, use_tqdm=False)
    assert np.array_equal(every.outputs[0].hidden_states, sampled.outputs[0].hidden_states)
    assert sampled.prompt_hidden_states is None and none.outputs[0].hidden_states is None
    assert every.outputs[0].token_ids == none.outputs[0].token_ids
    engine = llm.llm_engine
    engine.add_request("a", PROMPTS[1], PARAMS.clone(output_kind="delta"))
    parts, prompts = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts += [sample.hidden_states for sample in output.outputs if sample.hidden_states is not None]
            prompts.append(output.prompt_hidden_states)
    assert np.array_equal(np.concatenate(parts), every.outputs[0].hidden_states)
    assert np.array_equal(prompts[0], every.prompt_hidden_states) and all(each is None for each in prompts[1:])


def test_too_many_are_refused_before_anything_is_sampled(llm, monkeypatch):
    monkeypatch.setattr(hidden_states, "MAX_HIDDEN_BYTES", 20 * 64 * 4)
    width = llm.generate([[5]], PARAMS.clone(max_tokens=1), use_tqdm=False)[0].outputs[0].hidden_states.shape[1]
    monkeypatch.setattr(hidden_states, "MAX_HIDDEN_BYTES", 20 * width * 4)
    assert len(llm.generate([PROMPTS[0]], PARAMS.clone(max_tokens=13), use_tqdm=False)[0].outputs[0].token_ids) == 13
    with pytest.raises(RequestError, match=r"return_hidden_states='all'.*7 prompt tokens \+ n=1 x 14.*max_tokens=13"):
        llm.generate([PROMPTS[0]], PARAMS.clone(max_tokens=14), use_tqdm=False)
    with pytest.raises(RequestError, match="Give a smaller n, or a shorter prompt"):
        llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match="return_hidden_states='some'"):
        SamplingParams(return_hidden_states="some")
    assert SamplingParams(return_hidden_states=True).return_hidden_states == "all"


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_rollout_has_them_at_the_tokens_that_were_drawn_from_them(checkpoint, dtype, trainer, layout):
    with RolloutPolicy.from_pretrained(checkpoint, dtype=dtype, max_model_len=256) as policy:
        asked = PARAMS.clone(seed=None, return_hidden_states="sampled")
        sampled = policy.rollout(PROMPTS, asked, seed=2, layout=layout, use_tqdm=False)
        batch = policy.rollout(PROMPTS, asked.clone(return_hidden_states="all"), seed=2, layout=layout, use_tqdm=False)
    states, mask = batch["hidden_states"], batch["masks", "all_assistant_mask"]
    assert states.dtype == getattr(torch, dtype) and states.shape[:2] == mask.shape
    assert torch.equal(sampled["hidden_states"][mask], states[mask]) and not sampled["hidden_states"][~mask].any()
    ids = batch["tokens", "full"]
    rows = [(0, 0, 13), (1, 0, 96)] if layout == "padded" else [(0, 0, 13), (0, 13, 109)]
    for row, start, end in rows:
        expected = torch.from_numpy(states_of(trainer, ids[row, start:end].tolist())).to(states.dtype)
        assert torch.equal(states[row, start + 1 : end], expected[:-1]) and not states[row, start].any()
    assert concat([batch, batch])["hidden_states"].shape[-1] == states.shape[-1]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_they_cross_processes_and_replicas(checkpoint, dtype, llm, replicas):
    (expected,) = llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False)

    async def last():
        engine = AsyncLLM(checkpoint, dtype=dtype, max_model_len=256, num_replicas=replicas)
        try:
            async for output in engine.generate(PROMPTS[1], PARAMS, request_id="a"):
                last = output
            return last
        finally:
            engine.shutdown()

    output = asyncio.run(last())
    assert np.array_equal(output.prompt_hidden_states, expected.prompt_hidden_states)
    assert np.array_equal(output.outputs[0].hidden_states, expected.outputs[0].hidden_states)
