"""Requests that pool run under LoRA adapters as those that generate do, over every face."""

import asyncio

import numpy as np
import pytest
import torch

from rollout_engine import LLM, AsyncLLM, EngineConfig, LLMEngine, PoolingParams, SamplingParams
from rollout_engine.base.errors import RequestError
from rollout_engine.testing import merge_adapter, random_adapter, tiny_checkpoint, tiny_model

SIZES = dict(num_kv_blocks=256, max_model_len=256, max_loras=2)
PROMPT = list(range(3, 45))
MEAN = PoolingParams(kind="mean")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(checkpoint):
    with LLM(checkpoint, **SIZES) as llm:
        yield llm
        llm.check_integrity()


def adapter(name="a", **options):
    return random_adapter(tiny_model(), name, **({"seed": ord(name[0]), "std": 0.1} | options))


def data(outputs):
    return [output.outputs.data for output in outputs]


def test_hidden_states_are_those_of_the_merged_model(llm):
    base, got = data(llm.encode([PROMPT, PROMPT], MEAN, use_tqdm=False, lora_request=[None, adapter()]))
    states = merge_adapter(tiny_model(), adapter()).model(torch.tensor([PROMPT])).last_hidden_state
    np.testing.assert_allclose(got, states.mean(1)[0].detach(), rtol=1e-3, atol=1e-3)
    assert not np.allclose(base, got, atol=1e-2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_head_reads_the_states_of_the_merged_model_if_layers_run_as_modules(tmp_path, architecture):
    path = tiny_checkpoint(tmp_path, architecture, head="sequence", num_labels=3)
    lora = random_adapter(tiny_model(architecture), "a", seed=1, std=0.1)
    with LLM(path, **SIZES) as llm:
        watch = llm.llm_engine.frontend.client.driver.executor.worker.runner.model.layer_watch.watch
        compiled = data(llm.encode([PROMPT], PoolingParams(kind="classify"), use_tqdm=False, lora_request=lora))[0]
        watch(lambda *_: None)
        got = data(llm.encode([PROMPT], PoolingParams(kind="classify"), use_tqdm=False, lora_request="a"))[0]
        base = data(llm.encode([PROMPT], PoolingParams(kind="classify"), use_tqdm=False))[0]
    assert np.array_equal(got, compiled) and not np.allclose(base, got, atol=1e-2)


def test_an_adapter_has_the_same_bits_in_any_company_and_shares_no_kv_with_others(llm):
    llm.add_lora(adapter("a"))
    llm.add_lora(adapter("b"))
    loras = ["a", None, "b", "a"]
    for params in (PoolingParams(kind="last"), MEAN):
        together = data(llm.encode([PROMPT] * 4, params, use_tqdm=False, lora_request=loras))
        alone = [data(llm.encode([PROMPT], params, use_tqdm=False, lora_request=lora))[0] for lora in loras]
        assert all(map(np.array_equal, together, alone))
        assert len({each.tobytes() for each in together}) == 3
    llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False, lora_request="a")  # its KV is found
    assert np.array_equal(data(llm.encode([PROMPT], use_tqdm=False, lora_request="a"))[0], alone_last(llm, "a"))


def alone_last(llm, lora):
    prompt = {"prompt_token_ids": PROMPT, "cache_salt": "apart", "lora_request": lora}
    return data(llm.encode([prompt], use_tqdm=False))[0]


def test_rewards_come_under_an_adapter(tmp_path):
    with LLM(tiny_checkpoint(tmp_path, head="sequence", num_labels=1), **SIZES) as llm:
        base, got = data(llm.reward([PROMPT, PROMPT], use_tqdm=False, lora_request=[None, adapter()]))
    assert base.shape == got.shape == (1,) and base != got


def test_every_face_pools_under_an_adapter(llm, checkpoint):
    (expected,) = data(llm.encode([PROMPT], MEAN, use_tqdm=False, lora_request=adapter()))
    with LLMEngine.from_config(EngineConfig(model=str(checkpoint), **SIZES)) as engine:
        engine.add_request("r", PROMPT, MEAN, lora_request=adapter())
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert np.array_equal(outputs[0].pooled.data, expected)

    async def encode():
        async with AsyncLLM.from_config(EngineConfig(model=str(checkpoint), **SIZES)) as engine:
            return [output async for output in engine.encode(PROMPT, MEAN, lora_request=adapter())]

    assert np.array_equal(data(asyncio.run(encode()))[0], expected)


def test_an_unknown_adapter_is_refused(llm):
    for given in ({"lora_request": "b"}, {}):
        prompt = PROMPT if given else {"prompt_token_ids": PROMPT, "lora_request": "b"}
        with pytest.raises(RequestError, match=r"prompts\[0\]: lora_request: Unknown adapter 'b'"):
            llm.encode([prompt], use_tqdm=False, **given)


def test_a_list_of_params_of_another_length_is_refused_by_the_name_of_the_argument(llm):
    with pytest.raises(RequestError, match=r"pooling_params='a list of 1' .* must be one PoolingParams, or 2"):
        llm.encode([PROMPT, PROMPT], [MEAN], use_tqdm=False)
