"""Beam search compared with transformers' own, and its scores with the trainer's."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from rollout_engine.base.errors import RequestError
from rollout_engine.testing import tiny_checkpoint

PROMPTS = ["a", "some words"]
OPTIONS = dict(dtype="float32", num_kv_blocks=256, max_model_len=128, log_stats=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that ends its sequences now and then."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
        model.lm_head.weight[2] = model.lm_head.weight[229] * 0.98  # the end id is about as likely as a frequent token
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


def theirs(checkpoint, llm, prompt, width, max_tokens, length_penalty, ignore_eos):
    """(generated ids, score) of each sequence that transformers finds."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None if ignore_eos else 2
    ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
    found = model.generate(
        ids,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping="never",
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = found.sequences[:, ids.shape[1] :].tolist()
    ends = [max_tokens if ignore_eos or 2 not in row else row.index(2) + 1 for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)], found.sequences_scores.tolist()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "width, max_tokens, length_penalty, ignore_eos",
    [
        (4, 8, 1.0, True),
        (3, 12, 0.0, False),
        (4, 12, 1.0, False),
        pytest.param(2, 6, -1.0, False, marks=pytest.mark.slow),
    ],
)
def test_sequences_and_scores_are_those_of_transformers(checkpoint, llm, width, max_tokens, length_penalty, ignore_eos):
    params = BeamSearchParams(
        beam_width=width, max_tokens=max_tokens, length_penalty=length_penalty, ignore_eos=ignore_eos
    )
    outputs = llm.beam_search(PROMPTS, params)
    assert len(outputs) == 2
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, scores = theirs(checkpoint, llm, prompt, width, max_tokens, length_penalty, ignore_eos)
        num_prompt = len(llm.get_tokenizer().encode(prompt))
        assert [each.tokens[num_prompt:] for each in output.sequences] == tokens
        np.testing.assert_allclose([each.score for each in output.sequences], scores, rtol=1e-5)
        for each in output.sequences:
            assert each.finish_reason == ("stop" if each.tokens[-1] == 2 and not ignore_eos else "length")


def test_one_beam_is_greedy(llm):
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=8))
    for output, expected in zip(found, greedy, strict=True):
        [sequence] = output.sequences
        assert sequence.tokens == expected.prompt_token_ids + expected.outputs[0].token_ids


def test_some_sequences_end_and_some_do_not(llm):
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=12))
    assert {each.finish_reason for output in found for each in output.sequences} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_log_probs_are_those_that_score_gives_bit_for_bit(llm, temperature):
    params = BeamSearchParams(beam_width=4, max_tokens=6, temperature=temperature)
    [output] = llm.beam_search("some words", params)
    num_prompt = len(llm.get_tokenizer().encode("some words"))
    prompts, completions = zip(*((e.tokens[:num_prompt], e.tokens[num_prompt:]) for e in output.sequences), strict=True)
    scores = llm.score(list(prompts), list(completions), temperature=temperature or 1.0)
    for each, score in zip(output.sequences, scores, strict=True):
        assert each.logprobs.tobytes() == np.asarray(score, np.float32).tobytes()
        assert each.cum_logprob == pytest.approx(float(each.logprobs.astype(float).sum()), rel=1e-12)
        assert each.policy_versions == [0] * len(each.logprobs)
    assert [each.score for each in output.sequences] == sorted((e.score for e in output.sequences), reverse=True)


def test_the_text_leaves_the_end_token_out_unless_asked(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    for keeps in (False, True):
        [output] = llm.beam_search(["a"], params.clone(include_stop_str_in_output=keeps))
        ended = [each for each in output.sequences if each.finish_reason == "stop"]
        assert ended and all(each.text.endswith("<eos>") == keeps and each.stop_reason == 2 for each in ended)
        assert all(each.text.startswith("a") for each in output.sequences)


def shown(outputs):
    return [[(e.tokens, e.logprobs.tobytes(), e.score) for e in output.sequences] for output in outputs]


def test_it_is_the_same_without_a_cache_a_few_at_a_time_and_in_a_loop(checkpoint, llm):
    params = {"beam_width": 3, "max_tokens": 6}
    expected = shown(llm.beam_search(PROMPTS, params))
    assert shown(llm.beam_search(PROMPTS, params, concurrency_limit=1)) == expected
    with LLM(checkpoint, **OPTIONS, enable_prefix_caching=False) as other:
        assert shown(other.beam_search(PROMPTS, params)) == expected

    async def search(inner):
        async with AsyncLLM.from_engine(inner) as engine:
            return shown(await engine.beam_search(PROMPTS, params))

    with LLM(checkpoint, **OPTIONS) as other:
        assert asyncio.run(search(other)) == expected


@pytest.mark.parametrize(
    "params, field",
    [
        (dict(beam_width=0, max_tokens=1), "beam_width"),
        (dict(beam_width=64, max_tokens=1), "beam_width"),
        (dict(beam_width=2, max_tokens=0), "max_tokens"),
        (dict(beam_width=2, max_tokens=128), "max_tokens"),
        (dict(beam_width=2, max_tokens=1, temperature=-1.0), "temperature"),
        (dict(beam_width=2, max_tokens=1, length_penalty=11.0), "length_penalty"),
        (7, "params"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(llm, params, field):
    with pytest.raises(RequestError) as refused:
        llm.beam_search(PROMPTS, params)
    assert refused.value.field == field
    with pytest.raises(RequestError, match="concurrency_limit"):
        llm.beam_search(PROMPTS, dict(beam_width=1, max_tokens=1), concurrency_limit=0)
