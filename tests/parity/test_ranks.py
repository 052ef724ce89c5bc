"""A model cut over ranks says what one process says, to the bit: random models, engines, requests and updates.

    RANK_FUZZ_ROUNDS=200 python -m pytest tests/parity/test_ranks.py

Each round draws a model (architecture, sizes, ties, dtype), a number of ranks, an engine (chunks, a pool so small that
requests are preempted, prefix caching) and requests; some go on through updates of the weights. Everything is compared
with the same on one process: tokens, log-probs, versions, digests. A round is told by its number.
"""

import os
import random

import pytest

from rollout_engine import LLM, SamplingParams
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import assert_clean, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import SIZES

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
NUM_ROUNDS = int(os.environ.get("RANK_FUZZ_ROUNDS", "12"))
FUZZED = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral")
"""Drawn in both dtypes and with any heads; half of all rounds are theirs."""
OTHERS = (
    "cohere cohere2 gemma2 gemma3_text glm glm4 gpt_neox granite granitemoe nemotron olmo olmo2 olmo3 olmoe phi phi3 "
    "smollm3 starcoder2"
).split()
"""Exact in float32, with a plan to cut them by."""
HEADS = [(6, 2), (4, 4), (4, 2), (4, 1), (8, 2), (6, 3)]


def draw_model(rng):
    """(architecture, dtype, fields of its configuration, number of ranks)."""
    architecture = rng.choice(FUZZED) if rng.random() < 0.5 else rng.choice(OTHERS)
    fields = dict(SIZES[architecture])
    if architecture in FUZZED:
        heads, kv_heads = rng.choice(HEADS)
        fields |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
        fields |= dict(hidden_size=heads * rng.choice([8, 14, 24]))
        fields |= dict(intermediate_size=rng.choice([75, 88, 160]), moe_intermediate_size=rng.choice([40, 72]))
        fields |= dict(tie_word_embeddings=rng.random() < 0.3, vocab_size=rng.choice([259, 301]))
    heads = fields.get("num_attention_heads")
    kv_heads = fields.get("num_key_value_heads", heads)
    sizes = [n for n in (2, 3, 4) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    dtype = rng.choice(["float32", "bfloat16"]) if architecture in FUZZED else "float32"
    return architecture, dtype, fields, rng.choice(sizes)


def draw_engine(rng):
    """Options of an engine whose pool holds only a few of the sequences to come."""
    block_size = rng.choice([1, 4, 16, 64])
    return dict(
        block_size=block_size,
        num_kv_blocks=-(-rng.choice([200, 300, 1000]) // block_size),
        max_num_batched_tokens=rng.choice([7, 33, 64, 500]),
        max_num_seqs=rng.choice([2, 5, 64]),
        enable_prefix_caching=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.3,
    )


def draw_params(rng):
    """Sampling of one request."""
    fields = dict(n=rng.choice([1, 2, 3]), max_tokens=rng.choice([1, 8, 30]), seed=rng.randrange(1000))
    fields |= dict(temperature=rng.choice([0.0, 0.7, 1.0]), logprobs=rng.choice([0, 2]), ignore_eos=rng.random() < 0.8)
    if rng.random() < 0.4:
        fields |= rng.choice([dict(top_p=0.8), dict(top_k=5), dict(min_p=0.05)])
    if rng.random() < 0.3:
        fields |= rng.choice([dict(repetition_penalty=1.2), dict(presence_penalty=0.5), dict(prompt_logprobs=1)])
    return SamplingParams(**fields)


def draw_requests(rng):
    """Prompts of very different lengths, some continuations of others, with params."""
    prompts = [[rng.randrange(3, 259) for _ in range(rng.choice([1, 3, 17, 64, 100]))] for _ in range(4)]
    prompts += [prompts[rng.randrange(4)][: rng.choice([16, 64])] + [rng.randrange(3, 259)] for _ in range(3)]
    return [({"prompt_token_ids": prompt}, draw_params(rng)) for prompt in prompts]


def play(llm, seed, architecture, fields):
    """What an engine says to random requests while weights change, in a form that can be compared."""
    rng, engine, found = random.Random(seed), llm.llm_engine, []
    for part in range(2):
        requests = draw_requests(rng)
        ids = [engine.add_request(f"{part}-{i}", *request) for i, request in enumerate(requests)]
        updates, ended, step = {rng.randrange(1, 30): rng.choice(["keep", "recompute"]) for _ in range(2)}, {}, 0
        while engine.has_unfinished_requests():
            if (kv := updates.get(step)) is not None:
                source = tiny_model(architecture, seed=seed + step, **fields)
                found.append(engine.update_weights(source, kv=kv, staging=rng.choice(["shadow", "inplace"])).digest)
            ended |= {output.request_id: output for output in engine.step() if output.finished}
            step += 1
        for name in ids:
            found.append(_plain(ended[name].prompt_logprobs))
            for sample in ended[name].outputs:
                found.append((list(sample.token_ids), sample.finish_reason, repr(sample.version_spans)))
                found += map(_plain, (sample.logprobs, sample.top_logprobs, sample.kept_logprob_mass))
    found.append(_plain(llm.score([[5, 9, 2], [7]], [[4, 5], [8]])))
    found.append(llm.collective_rpc("get_weight_digest")[0])
    assert_clean(engine)
    return found


def _plain(value):
    """Arrays as bytes, also in tuples and lists."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.tobytes() if hasattr(value, "tobytes") else repr(value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_ranks_say_what_one_process_says(tmp_path, seed):
    rng = random.Random(f"ranks {seed}")
    architecture, dtype, fields, num_ranks = draw_model(rng)
    options = draw_engine(rng) | dict(dtype=dtype, num_threads=1, skip_tokenizer_init=True, log_stats=False)
    print(f"round {seed}: {architecture} {dtype} {fields} over {num_ranks} ranks, {options}")
    path = str(tiny_checkpoint(tmp_path, architecture, **fields))
    with LLM(path, **options) as one:
        expected = play(one, seed, architecture, fields)
        preemptions = one.llm_engine.stats.num_preemptions
    with LLM(path, tensor_parallel_size=num_ranks, **options) as cut:
        assert play(cut, seed, architecture, fields) == expected
        assert cut.llm_engine.stats.num_preemptions == preemptions
