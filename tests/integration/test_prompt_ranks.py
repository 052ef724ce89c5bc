"""Ranks of prompt tokens are their places in the trainer's own logits, however the prompt is computed."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, exact
from rollout_engine.core import config
from rollout_engine.testing import tiny_checkpoint

VOCAB_SIZE = 259
PROMPT = [3 + (7 * i) % 250 for i in range(150)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(dtype, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=getattr(torch, dtype))


@pytest.fixture(scope="module")
def start(checkpoint, dtype):
    return partial(LLM, checkpoint, dtype=dtype, log_stats=False)


@pytest.fixture(scope="module")
def logits(checkpoint):
    """Logits [P - 1, V] of the prompt in the trainer's forward, which has the engine's bits."""
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto"))
    with torch.no_grad():
        return trainer(torch.tensor([PROMPT])).logits[0, :-1]


@pytest.fixture(scope="module")
def expected(logits):
    """Places in a stable sort, which leaves equal logits in the order of their ids; 0 for the first token."""
    order = np.argsort(-logits.double().numpy(), axis=1, kind="stable")
    return [0, *(int(np.flatnonzero(row == token)[0]) + 1 for row, token in zip(order, PROMPT[1:], strict=True))]


@pytest.fixture(scope="module")
def llm(start):
    with start(num_kv_blocks=512) as llm:
        yield llm


def ask(llm, prompts=(PROMPT,), **params):
    params = {"max_tokens": 2, "ignore_eos": True, "prompt_logprobs": 0, "seed": 3} | params
    return llm.generate([*prompts], SamplingParams(**params), use_tqdm=False)


def ranks(llm, **params):
    (found,) = ask(llm, **params)
    assert found.prompt_ranks.dtype == np.int32
    return found.prompt_ranks.tolist()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"prompt_logprobs": 3},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 2, "temperature": 0.3},
        {"temperature": 0},
        {"prompt_logprobs": 2, "logprobs_mode": "raw", "n": 3},
        {"prompt_logprobs": 1, "logprobs_mode": "processed", "top_k": 3, "logit_bias": {9: 50.0}},
    ],
    ids=str,
)
def test_they_are_places_among_the_whole_vocabulary_whatever_is_asked_beside_them(llm, expected, params):
    assert ranks(llm, **params) == expected
    assert max(expected) > 64, "beyond every list"


def test_equal_logits_are_ranked_by_their_ids_and_so_are_listed_tokens(llm, logits, expected):
    own = logits.gather(1, torch.tensor(PROMPT[1:])[:, None])
    has_ties = ((logits == own).sum(1) > 1).any()
    assert has_ties or logits.dtype == torch.float32
    ids, _ = ask(llm, prompt_logprobs=-1)[0].prompt_top_logprobs
    for row, token, rank in zip(ids[1:], PROMPT[1:], expected[1:], strict=True):
        assert row[rank - 1] == token
    dicts = ask(llm, prompt_logprobs=60)[0].prompt_logprob_dicts()
    for row, token, rank in zip(dicts[1:], PROMPT[1:], expected[1:], strict=True):
        assert row[token].rank == rank and {each.rank for each in row.values()} == {*range(1, 61), rank}


def test_a_prompt_computed_in_pieces_and_blocks_has_them(start, expected, monkeypatch):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 32 * VOCAB_SIZE)
    monkeypatch.setattr("rollout_engine.kernels.token_logprobs._BLOCK_NUMEL", 5 * VOCAB_SIZE)
    with start(num_kv_blocks=512, max_num_batched_tokens=100) as small:
        for found in ask(small, [PROMPT] * 3, prompt_logprobs=3):
            assert found.prompt_ranks.tolist() == expected


def test_a_known_prefix_does_not_hide_them(llm, expected):
    ask(llm, prompt_logprobs=None)
    assert ask(llm, prompt_logprobs=None)[0].num_cached_tokens > 0
    assert ranks(llm) == expected


def test_preempted_requests_have_them(start, expected):
    with start(num_kv_blocks=22) as tight:
        found = ask(tight, [PROMPT] * 3, prompt_logprobs=2, max_tokens=40)
        assert tight.llm_engine.stats.num_preemptions > 0
    for each in found:
        assert each.prompt_ranks.tolist() == expected


def test_streams_tell_them_once_and_who_does_not_ask_gets_none(llm, expected):
    engine = llm.llm_engine
    engine.add_request("s", PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=0, output_kind="delta"))
    engine.add_request("t", PROMPT, SamplingParams(max_tokens=4, logprobs=2, output_kind="delta"))
    told = {"s": [], "t": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[output.request_id].append(output.prompt_ranks)
    first, *others = told["s"]
    assert first.tolist() == expected and len(others) == 3
    assert not any(each is not None for each in [*others, *told["t"]])


def test_rows_of_nan_do_not_end_the_step(checkpoint, start):
    weights = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").state_dict()
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights = {key: value.clone() for key, value in weights.items()}
    weights[name][PROMPT[4]] = torch.nan
    with start(num_kv_blocks=64) as broken:
        broken.update_weights(weights, allow_nonfinite=True)
        (found,) = ask(broken, [PROMPT[:4]], prompt_logprobs=2)
        (bad,) = ask(broken, [PROMPT[:8]], prompt_logprobs=2)
    assert found.outputs[0].finish_reason == "length" and bad.outputs[0].finish_reason == "error"
