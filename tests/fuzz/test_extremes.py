"""Every extreme of every parameter, alone and in pairs: a typed error at the door, or one whole answer.

Beside each batch runs a canary whose tokens must never change.
"""

import itertools
import math
import random

import numpy as np
import pytest

from rollout_engine import LLM, EngineConfig, SamplingParams
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.testing import tiny_checkpoint

VOCAB_SIZE = 259
REASONS = {"stop", "length", "abort"}

REQUEST_EXTREMES = {
    "n": [0, 1, 3, 10**9],
    "temperature": [0.0, 1e-30, 1e30, -1.0, math.nan, math.inf],
    "top_p": [1e-30, 1.0, 0.0, math.nan],
    "top_k": [1, VOCAB_SIZE, 2**62, -1],
    "min_p": [1e-30, 1.0, -0.1, math.nan],
    "repetition_penalty": [0.01, 100.0, 0.0, math.nan],
    "presence_penalty": [-2.0, 2.0, 2.1, math.nan],
    "frequency_penalty": [-2.0, 2.0, -2.1, math.inf],
    "logit_bias": [{}, {0: 100.0}, {258: -100.0, 3: 5.0}, {VOCAB_SIZE: 1.0}, {5: math.nan}],
    "allowed_token_ids": [[7], [], list(range(VOCAB_SIZE)), [VOCAB_SIZE]],
    "bad_words": [[], ["a"], [""], ["x" * 10**6]],
    "max_tokens": [1, 2**40, 0, -1],
    "min_tokens": [1, 3, 4, -1],
    "stop": [[], "a", ["a"], [""], ["\U0001f600", "b" * 100]],
    "stop_regex": [[], ["a+"], [""], ["("], "b"],
    "stop_token_ids": [[], list(range(100)), [VOCAB_SIZE], [-1]],
    "ignore_eos": [True, False, 2],
    "seed": [0, 2**64 - 1, 2**64, -1],
    "logprobs": [0, 5, VOCAB_SIZE, 10**9, -1],
    "prompt_logprobs": [0, 5, VOCAB_SIZE, 10**9, -1, -2],
    "logprob_token_ids": [[], [7, 7], [VOCAB_SIZE], [-1], list(range(1025))],
    "logprobs_mode": ["raw", "tempered", "processed", "loud"],
    "detokenize": [True, False, None],
    "skip_special_tokens": [True, False, "no"],
    "include_stop_str_in_output": [True, False],
    "spaces_between_special_tokens": [True, False, 1],
    "truncate_prompt_tokens": [1, -1, 2**40, 0],
    "truncation_side": ["left", "right", "middle"],
    "extra_args": [{}, {"a": [1, None]}, {"a": object()}],
    "speculation": [True, False, "auto"],
    "return_routed_experts": [True, False, 1],
    "return_support": [True, False, 1],
    "structured_outputs": [{"choice": ["a"]}, {"regex": "a+"}, {"regex": "("}, {"json": {"type": "none"}}, {"none": 1}],
    "thinking_budget": [0, 1, 2**31 - 1, -1, -2, True],
    "thinking_start": ["<think>", "a", "", "x" * 65, "</think>"],
    "thinking_end": ["</think>", "b", "", "x" * 65, "<think>"],
    "policy_version": [0, -1, 2**63, True],
    "min_policy_version": [0, -1, 2**63, 0.5],
    "version_wait": ["wait", "refuse", "end", "later"],
    "output_kind": ["cumulative", "delta", "final_only", "all"],
    "entropy": [True, False, 1],
    "return_hidden_states": ["sampled", "all", True, "some"],
    "kv_hint": ["keep", "drop", "prefetch", "away"],
}
CONFIG_EXTREMES = {
    "chat_template": [None, "{{ messages[0].content }}", "{% for", "no/such.jinja", ""],
    "dtype": ["float32", "bfloat16", "int8"],
    "device": ["cpu", "abacus"],
    "gpu_memory_utilization": [0.5, 1e-9, 0.0, 1.0, math.nan],
    "reserve_for_updates": [True, False, 1],
    "cuda_graphs": [True, False, 1],
    "compile": [True, False, 1],
    "max_model_len": [1, 24, 2**40, 0],
    "block_size": [1, 64, 48, 128],
    "kv_cache_bytes": [1, 2**20, 2**60, 0],
    "num_kv_blocks": [1, 4, 2**40, 0],
    "state_cache_bytes": [0, 2**20, 2**60, -1],
    "max_prompt_pictures": [0, 1, 2**31, -1],
    "max_picture_pixels": [1, 2**26, 2**62, 0, -1],
    "mm_cache_bytes": [0, 1, 2**60, -1],
    "encoder_cache_bytes": [0, 1, 2**60, -1],
    "max_num_seqs": [1, 2**20, 10**9, 0],
    "max_loras": [1, 64, 0, 10**6],
    "max_lora_rank": [1, 512, 0, 10**6],
    "max_num_batched_tokens": [1, 7, 2**24, 2**30, 0],
    "enable_prefix_caching": [False, True, "yes"],
    "async_scheduling": [False, True, "auto", "perhaps"],
    "speculation": ["off", "auto", {"max_draft_tokens": 64, "max_rollout_tokens": 0}, {"sources": []}, True],
    "seed": [0, 2**63 - 1, 2**63],
    "deterministic": [True, False, "auto", "sometimes"],
    "num_threads": [1, 2, 0, 10**6],
    "tensor_parallel_size": [1, 0, 65, 2**70],
    "data_parallel_size": [1, 0, 65, 2**70],
    "executor": ["auto", "inline", "process", "ray", "mpi"],
    "load_format": ["dummy", "auto", "magic"],
    "skip_tokenizer_init": [True, False],
    "admission": ["queue", "reject", "maybe"],
    "fp32_head": [True, False, 1],
    "quantization": [None, "int4", True],  # "int8" draws other tokens: tests/parity/test_int8.py
    "on_long": ["refuse", "clamp", "cut"],
    "logits_processors": [(), ("no_such_module:Class",), ("os:getcwd",), ("nonsense",)],
    "worker_extensions": [(), ("no_such_module:Class",), ("os:getcwd",), ("nonsense",)],
    "stream_interval": [1, 7, 2**40, 0],
    "log_stats": [True, False],
    "otlp_traces_endpoint": ["", "grpc://nowhere", 7],
    "profiler_dir": ["", "/nowhere", 7],
    "log_interval": [1e-9, 1e9, 0.0, math.nan],
    "step_trace": ["/dev/null/here", "\0", 7],
    "step_trace_bytes": [2**16, 2**50, 0],
    "step_deadline": [None, 600.0, 1e12, math.inf, 0.0, math.nan],
    "tokenizer": ["/nowhere", ""],
    "kv_connector": ["host", "disk", "nowhere:Class", "", 7],
    "kv_connector_bytes": [1, 2**20, 0, -1],
    "pipeline_parallel_size": [1, 0, 17, 2**70],
}
NOT_FUZZED = {"model"}


def settings(extremes, *, num_pairs=None):
    """All single settings and all pairs (or a seeded sample of them), as dicts."""
    singles = [{name: value} for name, values in extremes.items() for value in values]
    both = [
        {first: a, second: b}
        for first, second in itertools.combinations(extremes, 2)
        for a in extremes[first]
        for b in extremes[second]
    ]
    return singles + (both if num_pairs is None else random.Random(0).sample(both, num_pairs))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def engine(checkpoint):
    config = EngineConfig(model=str(checkpoint), num_kv_blocks=512, log_stats=False, max_model_len=256)
    with LLMEngine.from_config(config) as engine:
        yield engine


def test_no_parameter_is_forgotten():
    assert set(REQUEST_EXTREMES) == set(SamplingParams.__struct_fields__)
    assert set(CONFIG_EXTREMES) | NOT_FUZZED == set(EngineConfig.__struct_fields__)


def test_every_request_is_refused_at_the_door_or_answered_whole(engine):
    given = settings(REQUEST_EXTREMES)
    num_answered = num_refused = 0
    canary = _answers(engine, {"canary": {"seed": 1}})["canary"].outputs[0].token_ids
    for batch in _batched(given, 128):
        asked = {"canary": {"seed": 1}} | {f"{i}": setting for i, setting in enumerate(batch)}
        answers = _answers(engine, asked)
        assert answers.pop("canary").outputs[0].token_ids == canary
        for name, output in answers.items():
            _check_answer(output, {"max_tokens": 3} | asked[name])
        num_answered += len(answers)
        num_refused += len(asked) - 1 - len(answers)
        assert engine.get_num_unfinished_requests() == 0
        assert engine.get_cache_usage() == 0.0
        engine.check_integrity()
    assert num_answered + num_refused == len(given)
    assert num_answered > len(given) / 4
    assert num_refused > len(given) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_pairs", [4, pytest.param(40, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
def test_every_engine_is_refused_by_name_or_gives_the_same_tokens(checkpoint, num_pairs):
    baseline = _tokens(checkpoint, {})
    num_served = 0
    for setting in settings(CONFIG_EXTREMES, num_pairs=num_pairs):
        try:
            tokens = _tokens(checkpoint, setting)
        except ConfigError as error:
            assert any(name in str(error) for name in setting), f"{setting}: {error}"
            continue
        except RequestError as error:  # the engine is smaller than the prompt
            assert setting.keys() & {"max_model_len", "num_kv_blocks", "kv_cache_bytes"}, f"{setting}: {error}"
            continue
        num_served += 1
        if setting.get("dtype") != "bfloat16" and setting.get("load_format") != "dummy":
            if setting.get("deterministic") is not False:
                expected = [ids[: len(got)] for ids, got in zip(baseline, tokens, strict=True)]
                assert tokens == expected, setting
    assert num_served > 20


def _answers(engine, asked):
    """Every answer by name; whoever is not in it was refused with a `RequestError` that names one of its fields."""
    for name, setting in asked.items():
        try:
            params = SamplingParams(**{"max_tokens": 3, **setting})
            engine.add_request(name, [5, 6, 7, 8, 9], params)
        except RequestError as error:
            assert any(field in str(error) for field in setting), f"{setting}: {error}"
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    return finished


def _check_answer(output, setting):
    indices = [sample.index for sample in output.outputs]
    kind = setting.get("output_kind")
    assert indices == sorted(set(indices)), setting
    assert kind == "delta" or len(indices) == setting.get("n", 1), setting
    for sample in output.outputs:
        if "structured_outputs" in setting and "no token is left" in (sample.error or ""):
            continue  # what its form and other settings allow together ends here
        assert sample.finish_reason in REASONS, f"{setting}: {sample.finish_reason}, {sample.error}"
        assert all(0 <= token < VOCAB_SIZE for token in sample.token_ids), setting
        assert len(sample.token_ids) <= setting["max_tokens"], setting
        if sample.logprobs is not None:
            assert len(sample.logprobs) == len(sample.token_ids), setting
            assert not np.isnan(sample.logprobs).any() and (sample.logprobs <= 0).all(), setting
        if allowed := setting.get("allowed_token_ids"):
            assert set(sample.token_ids) <= set(allowed), setting


def _tokens(checkpoint, setting):
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": [9] * 12}]
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    with LLM(str(checkpoint), **({"log_stats": False, "num_threads": 1} | setting)) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def _batched(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]
