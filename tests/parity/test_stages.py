"""A model whose layers are divided among stages says what one process says, to the bit.

Tokens, log-probs, scores, digests, routed experts, adapters, prefixes, chunks, preemption, updates that requests live
through, sleeps and saved parts, of dense models, mixtures and models whose layers keep states.
"""

import random
from collections import defaultdict

import numpy as np
import pytest

from rollout_engine import LLM, PoolingParams, SamplingParams
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import assert_clean, random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
_MORE = dict(num_hidden_layers=5)
_HYBRID = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
"""Each stage has a layer of both kinds."""
CASES = {
    "dense": ("qwen3", 2, 1, dict(num_hidden_layers=3)),
    "hybrid mixture": ("qwen3_5_moe_text", 2, 1, _HYBRID),
    "hybrid": ("qwen3_5_text", 2, 1, _HYBRID),
    "tied, three stages": ("llama", 3, 1, _MORE | dict(tie_word_embeddings=True)),
    "mixture": ("qwen3_moe", 2, 1, dict(num_hidden_layers=3)),
    "stages of ranks": ("qwen3", 2, 2, dict(num_hidden_layers=3, tie_word_embeddings=True)),
    "mixture, stages of ranks": ("mixtral", 2, 2, dict(num_hidden_layers=3)),
    "windows": ("gemma3_text", 2, 1, {}),
    "a stage without attention": ("qwen3_5_text", 2, 1, {}),
    "mamba": ("bamba", 2, 1, {}),
    "short convolutions": ("lfm2", 2, 1, {}),
    "latents": ("deepseek_v3", 2, 1, {}),
    "modules": ("phi", 2, 1, {}),
    "scaled embeddings": ("granite", 2, 1, {}),
}
QUICK = ("dense", "hybrid mixture")
every_case = pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
PARAMS = SamplingParams(n=3, max_tokens=16, logprobs=0, ignore_eos=True, seed=3)


def fields_of(architecture, fields):
    return {**SIZES, **HYBRID_SIZES}.get(architecture, {}) | fields


def engine_of(path, num_stages=1, num_ranks=1, **options):
    sizes = dict(num_kv_blocks=40, max_num_seqs=6, max_num_batched_tokens=64, block_size=4)
    options = dict(num_threads=1, skip_tokenizer_init=True, log_stats=False) | sizes | options
    return LLM(str(path), pipeline_parallel_size=num_stages, tensor_parallel_size=num_ranks, **options)


def roomy(architecture):
    """Options with which states of prefixes are kept until they are found; without them sequences are preempted."""
    return dict(num_kv_blocks=70, state_cache_bytes=1 << 24) if architecture in HYBRID_SIZES else {}


def prompts():
    rng = random.Random(5)
    return [[rng.randrange(3, 200) for _ in range(size)] for size in (45, 9, 70, 3)]


def said(llm, params=PARAMS, **options):
    """Bits of the samples of four prompts, and of others that continue them."""
    outputs = llm.generate(prompts(), params, use_tqdm=False, **options)
    outputs += llm.generate([prompt + [7, 8] for prompt in prompts()], params, use_tqdm=False, **options)
    found = [(list(s.token_ids), s.logprobs.tobytes()) for output in outputs for s in output.outputs]
    return [*found, *(plain(output.prompt_logprobs) for output in outputs)]


def plain(value):
    return [plain(each) for each in value] if isinstance(value, list | tuple) else repr(value)


def story(llm, architecture, fields):
    """All that an engine says, through updates and sleeps."""
    found = [said(llm), said(llm, PARAMS.clone(prompt_logprobs=0, n=1, temperature=0.0))]
    found += [values.tobytes() for values in llm.score([[5, 9, 2], [7]], [[4, 5], [8]])]
    found.append(llm.update_weights(tiny_model(architecture, seed=6, **fields)).digest)
    found.append(said(llm))
    llm.sleep(level=1)
    llm.wake_up()
    found.append(said(llm))
    llm.sleep(level=2)
    llm.wake_up()
    found.append(llm.update_weights(tiny_model(architecture, seed=7, **fields), staging="inplace").digest)
    found += [said(llm), llm.collective_rpc("get_weight_digest")[0]]
    assert_clean(llm.llm_engine)
    return found


@pytest.mark.quick(1)
@every_case
def test_stages_say_what_one_process_says(tmp_path, case):
    architecture, num_stages, num_ranks, given = CASES[case]
    fields = fields_of(architecture, given)
    path = tiny_checkpoint(tmp_path, architecture, **fields)
    with engine_of(path) as one:
        expected = story(one, architecture, fields)
        assert one.llm_engine.stats.num_preemptions > 0
    with engine_of(path, num_stages, num_ranks) as staged:
        found = story(staged, architecture, fields)
        assert staged.llm_engine.stats.num_preemptions > 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == theirs, number


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_layers_are_those_of_one_process(tmp_path, dtype):
    fields, found = fields_of("llama", _MORE), []
    path = tiny_checkpoint(tmp_path, "llama", **fields)
    for num_stages in (1, 3):
        with engine_of(path, num_stages, quantization="int8", dtype=dtype) as llm:
            found.append(story(llm, "llama", fields))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dense", "mixture", "hybrid", "stages of ranks"])
def test_updates_in_flight_are_those_of_one_process(tmp_path, case):
    """Every token has the log-prob under the version that it names: KV is computed again at each update."""
    architecture, num_stages, num_ranks, given = CASES[case]
    fields = fields_of(architecture, given)
    path = tiny_checkpoint(tmp_path, architecture, **fields)
    sources = {version: tiny_model(architecture, seed=10 + version, **fields) for version in (1, 2, 3)}
    wanted = defaultdict(list)
    with engine_of(path, num_stages, num_ranks) as staged:
        engine = staged.llm_engine
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, PARAMS.clone(max_tokens=40, seed=number))
        ended, step = [], 0
        while engine.has_unfinished_requests():
            if step % 25 == 10 and (version := step // 25 + 1) in sources:
                engine.update_weights(sources[version], kv="recompute")
            ended += [output for output in engine.step() if output.finished]
            step += 1
        assert_clean(engine)
    for output in ended:
        for sample in output.outputs:
            for span in sample.version_spans:
                start, stop, version = span.start, span.end, span.policy_version
                wanted[version].append((output.prompt_token_ids, sample, start, stop))
    assert len(wanted) > 2
    with engine_of(path) as one:
        for version, samples in sorted(wanted.items()):
            if version:
                one.update_weights(sources[version])
            for prompt, sample, start, stop in samples:
                context, tokens = prompt + list(sample.token_ids[:start]), list(sample.token_ids[start:stop])
                (scores,) = one.score([context], [tokens])
                assert scores.tobytes() == np.asarray(sample.logprobs[start:stop], np.float32).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixture", "mixture, stages of ranks"])
def test_routed_experts_are_those_of_all_stages(tmp_path, case):
    architecture, num_stages, num_ranks, given = CASES[case]
    path = tiny_checkpoint(tmp_path, architecture, **fields_of(architecture, given))
    params, found = PARAMS.clone(return_routed_experts=True, n=2), []
    for sizes in ((1, 1), (num_stages, num_ranks)):
        with engine_of(path, *sizes) as llm:
            outputs = llm.generate(prompts(), params, use_tqdm=False)
            experts = [sample.routed_experts for output in outputs for sample in output.outputs]
            assert all(each.shape[1] == 3 for each in experts)
            pairs = prompts(), [list(output.outputs[0].token_ids) for output in outputs]
            others = [(each.routed_experts + 1) % 5 for output in outputs for each in output.outputs[:1]]
            scores = [*llm.score(*pairs), *llm.score(*pairs, routed_experts=others)]
            assert_clean(llm.llm_engine)
        found.append([each.tobytes() for each in (*experts, *scores)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dense", "mixture", "hybrid", "stages of ranks"])
def test_adapters_and_saved_parts_are_those_of_one_process(tmp_path, case):
    architecture, num_stages, num_ranks, given = CASES[case]
    fields = fields_of(architecture, given)
    path, found = tiny_checkpoint(tmp_path / "model", architecture, **fields), []
    for sizes in ((1, 1), (num_stages, num_ranks)):
        with engine_of(path, *sizes, **roomy(architecture), max_loras=1, max_lora_rank=16) as llm:
            llm.add_lora(random_adapter(tiny_model(architecture, **fields), "a", seed=4))
            parts = [said(llm), said(llm, lora_request="a")]
            llm.update_weights(tiny_model(architecture, seed=6, **fields))
            parts += [said(llm), said(llm, lora_request="a")]
            assert llm.llm_engine.stats.num_cached_tokens > 0
            llm.llm_engine.save_sharded_state(tmp_path / f"state of {sizes[0]}")
        found.append(parts)
    assert found[0] == found[1]
    options = roomy(architecture) | dict(load_format="sharded")
    with engine_of(tmp_path / f"state of {num_stages}", num_stages, num_ranks, **options) as llm:
        assert said(llm) == found[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dense", "hybrid", "stages of ranks"])
def test_no_stage_holds_more_than_its_share_of_the_weights(tmp_path, case):
    architecture, num_stages, num_ranks, given = CASES[case]
    path = tiny_checkpoint(tmp_path, architecture, **fields_of(architecture, given | dict(num_hidden_layers=4)))
    extension, sizes = dict(worker_extensions=("tests.parity.expert_sizes:ExpertSizes",)), []
    for each in ((1, 1), (num_stages, num_ranks)):
        with engine_of(path, *each, **extension) as llm:
            sizes.append(llm.collective_rpc("get_weight_size"))
    assert max(sizes[1]) <= 0.6 * sizes[0][0] / num_ranks + 3000 * (num_ranks - 1)  # norms are on every rank


@pytest.mark.slow
def test_pooled_prompts_and_hidden_states_are_those_of_one_process(tmp_path):
    path, found = tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=3), []
    for num_stages in (1, 2):
        with engine_of(path, num_stages) as llm:
            pooled = [plain(each.outputs) for each in llm.encode(prompts(), PoolingParams(kind="mean"), use_tqdm=False)]
            params = PARAMS.clone(return_hidden_states="all", n=1)
            outputs = llm.generate(prompts(), params, use_tqdm=False)
            states = [o.prompt_hidden_states.tobytes() for o in outputs]
            states += [o.outputs[0].hidden_states.tobytes() for o in outputs]
        found.append((pooled, states))
    assert found[0] == found[1]


def draw_engine(rng):
    block_size = rng.choice([1, 4, 16, 64])
    return dict(
        block_size=block_size,
        num_kv_blocks=-(-rng.choice([220, 300, 1000]) // block_size),
        max_num_batched_tokens=rng.choice([7, 33, 64, 500]),
        max_num_seqs=rng.choice([2, 5, 64]),
        enable_prefix_caching=rng.random() < 0.7,
        dtype=rng.choice(["float32", "bfloat16"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_engines_and_requests(tmp_path, seed):
    rng = random.Random(f"stages {seed}")
    architecture = rng.choice(["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"])
    num_stages, num_ranks = rng.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    fields = fields_of(architecture, dict(num_hidden_layers=rng.choice([4, 5, 7])))
    path, options = tiny_checkpoint(tmp_path, architecture, **fields), draw_engine(rng)
    requests = []
    for number in range(12):
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice([1, 3, 17, 64, 100]))]
        params = PARAMS.clone(n=rng.choice([1, 2, 4]), max_tokens=rng.choice([1, 8, 30]), seed=number)
        requests.append((prompt, params.clone(prompt_logprobs=rng.choice([None, None, 0]))))
    found = []
    for sizes in ((1, 1), (num_stages, num_ranks)):
        with engine_of(path, *sizes, **options) as llm:
            texts, params = zip(*requests, strict=True)
            outputs = llm.generate(list(texts), list(params), use_tqdm=False)
            assert_clean(llm.llm_engine)
        samples = [(list(s.token_ids), s.logprobs.tobytes()) for o in outputs for s in o.outputs]
        found.append((samples, [plain(o.prompt_logprobs) for o in outputs]))
    assert found[0] == found[1], (architecture, num_stages, num_ranks, options)
