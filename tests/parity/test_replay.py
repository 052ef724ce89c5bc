"""The same seed gives the same tokens alone, among others, after preemption, and in a new process."""

import json
import subprocess
import sys

import pytest

from rollout_engine import LLM, SamplingParams

PROMPT = list(range(3, 43))
PARAMS = dict(max_tokens=48, logprobs=0, ignore_eos=True, top_p=0.95, seed=1234)


def sample_of(llm, prompts, **params):
    out = llm.generate(prompts, SamplingParams(**(PARAMS | params)), use_tqdm=False)
    return out[0].outputs[0].token_ids, out[0].outputs[0].logprobs.tolist()


def test_a_seed_decides_the_sample_alone_and_in_a_batch_of_64(checkpoint):
    with LLM(str(checkpoint("qwen3")), log_stats=False) as llm:
        alone = sample_of(llm, [PROMPT])
        others = [[3 + i, 7, 9 + i] * (i % 9 + 1) for i in range(63)]
        assert sample_of(llm, [PROMPT, *others]) == alone
        assert sample_of(llm, [PROMPT], seed=1235) != alone


def test_preemption_does_not_change_a_sample(checkpoint):
    with LLM(str(checkpoint("qwen3")), log_stats=False) as llm:
        roomy = [sample_of(llm, [PROMPT], seed=s) for s in range(6)]
    with LLM(str(checkpoint("qwen3")), log_stats=False, num_kv_blocks=12, enable_prefix_caching=False) as llm:
        params = [SamplingParams(**(PARAMS | {"seed": s})) for s in range(6)]
        tight = llm.generate([PROMPT] * 6, params, use_tqdm=False)
        assert llm.llm_engine.stats.num_preemptions > 0
    assert [(o.outputs[0].token_ids, o.outputs[0].logprobs.tolist()) for o in tight] == roomy


def test_a_returned_seed_replays_its_sample(checkpoint):
    with LLM(str(checkpoint("llama")), log_stats=False) as llm:
        group = llm.generate([PROMPT], SamplingParams(max_tokens=20, n=5, ignore_eos=True), use_tqdm=False)[0].outputs
        assert len({tuple(s.token_ids) for s in group}) == 5
        for sample in group:
            assert sample_of(llm, [PROMPT], seed=sample.seed, max_tokens=20, top_p=1.0)[0] == sample.token_ids


@pytest.mark.slow
def test_a_new_process_gives_the_same_tokens(checkpoint):
    directory = str(checkpoint("qwen2"))
    script = (
        "import json, sys; from rollout_engine import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], log_stats=False)\n"
        "params = SamplingParams(**json.loads(sys.argv[3]))\n"
        "s = llm.generate([json.loads(sys.argv[2])], params, use_tqdm=False)[0].outputs[0]\n"
        "print(json.dumps([s.token_ids, s.logprobs.tolist()]))"
    )
    command = [sys.executable, "-c", script, directory, json.dumps(PROMPT), json.dumps(PARAMS)]
    there = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    with LLM(directory, log_stats=False) as llm:
        assert list(sample_of(llm, [PROMPT])) == there
