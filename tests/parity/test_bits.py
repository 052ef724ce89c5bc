"""The numerics contract: engine log-probs and the exact trainer's agree bit for bit, whatever the engine did.

Each round draws an engine (block size, chunking, a pool so small that requests are preempted, prefix caching, thread
count), a set of prompts with shared prefixes, and sampling settings; then the trainer computes the same tokens in one
dense batch on another thread count. No tolerance anywhere.
"""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.sampling import draw_pieces, logit_rows
from rollout_engine.testing import assert_clean, tiny_model
from rollout_engine.testing.architectures import SIZES

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"]
NOT_EXACT = {"gpt2", "opt"}
"""Refused by the trainer's side, and by the engine's where asked for."""
COMPILED = {"llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"}
"""Whose decoder layers run as one call."""
MIXTURES = dict.fromkeys("dots1 granitemoe hy_v3 minimax_m2 qwen2_moe solar_open".split(), True) | dict.fromkeys(
    "afmoe deepseek_v2 deepseek_v3 ernie4_5_moe exaone_moe gemma4_text_experts glm4_moe glm4_moe_lite gpt_oss "
    "laguna longcat_flash mimo_v2_flash phimoe".split(),
    False,
)
"""Mixtures of experts with other routers than a plain softmax, or with a shared expert, and whether their layers run as
one call."""
OTHERS = sorted(SIZES.keys() - NOT_EXACT - set(ARCHITECTURES) - MIXTURES.keys())
QUICK = {"gemma3_text", "gpt_neox", "olmo2", "phi3"}
"""Of OTHERS: those in every run; each has an operation of its own."""
DTYPES = [torch.float32, torch.bfloat16]
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=pytest.mark.slow if slow else ())
    for name in ARCHITECTURES
    for dtype in DTYPES
    for slow in [name in ("mixtral", "mistral") and dtype == torch.bfloat16]
]
"""Of the two mixtures in bfloat16 qwen3_moe is the quick one."""

pytestmark = pytest.mark.usefixtures("own_products")


def draw_engine(rng):
    """Random engine options, with a pool that holds only a few of the sequences to come."""
    block_size = rng.choice([1, 4, 16, 64])
    return dict(
        block_size=block_size,
        num_kv_blocks=-(-rng.choice([260, 400, 2000]) // block_size),
        max_num_batched_tokens=rng.choice([7, 33, 64, 500]),
        max_num_seqs=rng.choice([2, 5, 64]),
        enable_prefix_caching=rng.random() < 0.7,
        num_threads=rng.choice([1, 2]),
        async_scheduling=rng.random() < 0.5,
    )


def draw_prompts(rng):
    """Prompts of very different lengths, several of them continuations of others."""
    prompts = [[rng.randrange(3, 259) for _ in range(rng.choice([1, 3, 17, 64, 130]))] for _ in range(4)]
    prompts += [prompts[rng.randrange(4)][: rng.choice([16, 64, 130])] + [rng.randrange(3, 259)] for _ in range(3)]
    return prompts


def mismatches(outputs, trainer, temperature):
    """(tokens compared, tokens whose log-probs differ) between the engine's outputs and the trainer."""
    samples = [(out.prompt_token_ids, sample) for out in outputs for sample in out.outputs]
    length = max(len(prompt) + len(sample.token_ids) for prompt, sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    mask = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, (prompt, sample) in enumerate(samples):
        tokens = prompt + sample.token_ids
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), True
    with torch.no_grad():
        theirs = exact.token_logprobs(trainer, ids, mask, temperature=temperature).numpy()
    compared = wrong = 0
    for row, (prompt, sample) in enumerate(samples):
        mine = sample.logprobs
        right = theirs[row, len(prompt) - 1 : len(prompt) - 1 + len(mine)]
        compared += len(mine)
        wrong += int((mine.view(np.int32) != right.view(np.int32)).sum())
    return compared, wrong


def layers_are_compiled(llm):
    return llm.frontend.client.driver.executor.worker.runner.model.decoder is not None


def run_round(directory, trainer, rng, *, compiled=None, **overrides):
    options = draw_engine(rng) | {"dtype": str(next(trainer.parameters()).dtype)[6:]} | overrides
    temperature = rng.choice([1.0, 0.7, 1.3])
    params = SamplingParams(
        temperature=temperature,
        max_tokens=rng.choice([8, 40, 70]),
        n=rng.choice([1, 2, 3]),
        logprobs=0,
        ignore_eos=True,
    )
    with LLM(str(directory), log_stats=False, **options) as llm:
        assert compiled is None or compiled == layers_are_compiled(llm)
        outputs = []
        for _ in range(2):  # the second call finds the first one's prefixes
            outputs += llm.generate(draw_prompts(rng), params, use_tqdm=False)
        assert_clean(llm.llm_engine)
    torch.set_num_threads(rng.choice([1, 2]))
    return mismatches(outputs, trainer, temperature)


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_tokens", [500, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_no_bit_differs_from_the_trainer(checkpoint, some_of, architecture, dtype, num_tokens):
    directory = checkpoint(architecture, dtype, **SIZES[architecture])
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    rng = random.Random(f"{architecture} {dtype}")
    compared = wrong = 0
    while compared < some_of(num_tokens):
        more, bad = run_round(directory, trainer, rng, compiled=architecture in COMPILED)
        compared, wrong = compared + more, wrong + bad
    assert wrong == 0, f"{wrong} of {compared} log-probs differ"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
)
def test_no_bit_differs_in_other_architectures(checkpoint, architecture):
    compare_once(checkpoint(architecture, **SIZES[architecture]), architecture)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if quick else pytest.mark.slow)
        for name in MIXTURES
        for dtype in DTYPES
        for quick in [
            (name, dtype) in {("qwen2_moe", torch.bfloat16), ("dots1", torch.bfloat16), ("afmoe", torch.float32)}
        ]
    ],
)
def test_no_bit_differs_in_mixtures_with_other_routers(sized_checkpoint, architecture, dtype):
    compare_once(sized_checkpoint(architecture, dtype), architecture, compiled=MIXTURES[architecture])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "gemma4_text", "gpt_neox", "olmo2", "phi3"])
def test_no_bit_differs_in_other_architectures_in_bfloat16(checkpoint, architecture):
    directory = checkpoint(architecture, torch.bfloat16, **SIZES[architecture])
    try:
        compare_once(directory, architecture)
    except ConfigError as refusal:  # without AVX-512
        if architecture != "gpt_neox" or "such as gelu" not in str(refusal):
            raise
        pytest.skip("torch's own GELU gives a bfloat16 row other bits in other batches on this CPU")


def compare_once(directory, seed, **options):
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    compared, wrong = run_round(directory, trainer, random.Random(seed), deterministic=True, **options)
    assert compared > 100
    assert wrong == 0, f"{wrong} of {compared} log-probs differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_no_bit_differs_where_head_and_draws_run_over_pieces(checkpoint, dtype, monkeypatch):
    directory = checkpoint("llama", dtype, **SIZES["llama"])
    params = SamplingParams(n=70, max_tokens=3, logprobs=2, seed=3, temperature=0.7, top_p=0.9, ignore_eos=True)
    drawn, draw = [], draw_pieces.sample

    def counted(logits, *args):
        drawn.append(len(logits))
        return draw(logits, *args)

    monkeypatch.setattr(draw_pieces, "sample", counted)
    found = []
    for num_rows in (1_000, 8):
        monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", num_rows * 259)
        drawn.clear()
        with LLM(str(directory), dtype=str(dtype)[6:], log_stats=False, enable_prefix_caching=False) as llm:
            found.append(llm.generate([[5, 6, 7], list(range(3, 60))], params, use_tqdm=False))
        assert max(drawn) == min(num_rows, 140)
    compared, wrong = mismatches(found[1], exact.enable(AutoModelForCausalLM.from_pretrained(directory)), 0.7)
    assert (compared, wrong) == (2 * 70 * 3, 0)
    for one, other in zip(*([sample for out in outputs for sample in out.outputs] for outputs in found), strict=True):
        assert one.token_ids == other.token_ids
        for name in ("logprobs", "kept_logprob_mass", "sampled_ranks"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for mine, theirs in zip(one.top_logprobs, other.top_logprobs, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.quick(1)
@pytest.mark.parametrize("names", ["the module's", "the checkpoint's"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_an_update_reaches_every_expert(checkpoint, architecture, names, tmp_path):
    trainer = tiny_model(architecture, seed=1, **SIZES[architecture])
    trainer.save_pretrained(tmp_path)
    source = trainer if names == "the module's" else load_file(tmp_path / "model.safetensors")
    params = SamplingParams(max_tokens=30, n=3, logprobs=0, ignore_eos=True)
    with LLM(str(checkpoint(architecture, **SIZES[architecture])), log_stats=False) as llm:
        llm.generate(draw_prompts(random.Random(0)), params, use_tqdm=False)
        llm.update_weights(source)
        outputs = llm.generate(draw_prompts(random.Random(0)), params, use_tqdm=False)
    compared, wrong = mismatches(outputs, exact.enable(trainer), 1.0)
    assert (compared, wrong) == (7 * 3 * 30, 0)


@pytest.mark.parametrize("architecture", sorted(NOT_EXACT))
def test_what_is_not_exact_is_refused_on_both_sides(checkpoint, architecture):
    directory = checkpoint(architecture, **SIZES[architecture])
    with pytest.raises(ConfigError, match="cannot be exact"):
        exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    with pytest.raises(ConfigError, match="deterministic=True is not possible"):
        LLM(str(directory), deterministic=True)


def test_with_the_mode_off_differences_appear(checkpoint):
    """The negative control: the comparison above can fail."""
    directory = checkpoint("qwen2")
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(directory))
    compared, wrong = run_round(directory, trainer, random.Random(0), deterministic=False, max_num_seqs=5)
    assert wrong > compared * 0.01


def test_score_returns_the_sampled_log_probs_bit_for_bit(checkpoint):
    with LLM(str(checkpoint("qwen3")), log_stats=False) as llm:
        params = SamplingParams(max_tokens=40, n=3, logprobs=0, ignore_eos=True, temperature=0.8)
        outputs = llm.generate([[5, 6, 7], list(range(3, 140))], params, use_tqdm=False)
        samples = [(out.prompt_token_ids, sample) for out in outputs for sample in out.outputs]
        scored = llm.score([p for p, _ in samples], [s.token_ids for _, s in samples], temperature=0.8)
    for (_, sample), values in zip(samples, scored, strict=True):
        assert np.array_equal(sample.logprobs, values)
