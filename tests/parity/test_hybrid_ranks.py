"""Models whose layers keep states give, cut over ranks, the tokens and log-probs of one process, to the bit.

Samples that read one state, snapshots inside prompts, drafts, preemption, updates, sleeps, adapters and saved parts.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mixers import mixers_of, swap_mixers
from rollout_engine.model.ranks.cut import cut_module
from rollout_engine.testing import assert_clean, random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES
from tests.parity.test_ranks import play

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
_THREE = dict(num_key_value_heads=3, linear_num_key_heads=3, linear_num_value_heads=6)
CASES = {
    "qwen3_5_text on 2": ("qwen3_5_text", 2, {}),
    "qwen3_5_text on 3": ("qwen3_5_text", 3, _THREE),
    "states whole on 3": ("qwen3_5_text", 3, dict(num_key_value_heads=3)),
    "qwen3_5_moe_text on 2": ("qwen3_5_moe_text", 2, {}),
    "bamba on 2": ("bamba", 2, dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=48)),
    "heads of two groups on 3": ("bamba", 3, {}),
    "lfm2 on 3": ("lfm2", 3, dict(num_key_value_heads=3)),
    "nemotron_h on 2": ("nemotron_h", 2, {}),
    "kimi_linear on 2": ("kimi_linear", 2, {}),
    "olmo_hybrid on 2": ("olmo_hybrid", 2, {}),
    "qwen3_next on 2": ("qwen3_next", 2, {}),
    "lfm2_moe on 3": ("lfm2_moe", 3, dict(num_key_value_heads=3)),
    "falcon_h1 on 2": ("falcon_h1", 2, dict(num_attention_heads=4, num_key_value_heads=2)),
    "granitemoehybrid on 2": ("granitemoehybrid", 2, dict(num_attention_heads=4, num_key_value_heads=2)),
}
PARAMS = SamplingParams(n=3, max_tokens=16, logprobs=0, ignore_eos=True, seed=3)


def fields_of(case):
    architecture, num_ranks, fields = CASES[case]
    return architecture, num_ranks, HYBRID_SIZES[architecture] | fields


def engine_of(path, num_ranks, **options):
    options = dict(num_threads=1, skip_tokenizer_init=True, log_stats=False, block_size=4) | options
    return LLM(str(path), tensor_parallel_size=num_ranks, **options)


def said(llm, params=PARAMS, **options):
    """Bits of the samples of four prompts, two of which continue others."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 259) for _ in range(size)] for size in (45, 9)]
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    outputs += llm.generate([prompt + [7, 8] for prompt in prompts], params, use_tqdm=False, **options)
    assert all(output.num_cached_tokens > 0 for output in outputs[2:])
    return [(list(s.token_ids), s.logprobs.tobytes()) for output in outputs for s in output.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_say_what_one_process_says(tmp_path, case):
    """Forks, chunks, updates that keep or recompute, preemption: all that the fuzz of other types draws."""
    architecture, num_ranks, fields = fields_of(case)
    options = dict(num_kv_blocks=36, max_num_seqs=5, max_num_batched_tokens=64)
    options |= dict(dtype=random.Random(case).choice(["float32", "bfloat16"]))
    options |= dict(state_cache_bytes=1 << 24)  # more than are taken: steps do not depend on the number of ranks
    path = tiny_checkpoint(tmp_path, architecture, **fields)
    with engine_of(path, 1, **options) as one:
        expected, preemptions = play(one, 1, architecture, fields), one.llm_engine.stats.num_preemptions
    with engine_of(path, num_ranks, **options) as cut:
        assert play(cut, 1, architecture, fields) == expected
        assert cut.llm_engine.stats.num_preemptions == preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_5_text on 2", "heads of two groups on 3"])
def test_drafts_change_no_bit_on_ranks(tmp_path, case):
    architecture, num_ranks, fields = fields_of(case)
    path = tiny_checkpoint(tmp_path, architecture, **fields)
    params = PARAMS.clone(max_tokens=40, temperature=0.3)
    with engine_of(path, 1) as one:
        expected = [said(one, params), said(one, params)]
    with engine_of(path, num_ranks, speculation=SpeculationConfig(max_draft_tokens=3)) as cut:
        core = cut.llm_engine.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        assert [said(cut, params), said(cut, params)] == expected
        assert sum(core.stats.drafts.num_accepted) > 0
        assert_clean(cut.llm_engine)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_5_text on 2", "heads of two groups on 3", "lfm2 on 3"])
def test_adapters_sleeps_and_saved_parts_are_those_of_one_process(tmp_path, case):
    architecture, num_ranks, fields = fields_of(case)
    path, found = tiny_checkpoint(tmp_path / "model", architecture, **fields), []
    for ranks in (1, num_ranks):
        options = dict(max_loras=1, max_lora_rank=16, state_cache_bytes=1 << 20)
        with engine_of(path, ranks, **options) as llm:
            llm.add_lora(random_adapter(tiny_model(architecture, **fields), "a", seed=4))
            story = [said(llm), said(llm, lora_request="a")]
            llm.update_weights(tiny_model(architecture, seed=6, **fields))
            llm.sleep(level=1)
            llm.wake_up()
            story += [said(llm), said(llm, lora_request="a")]
            story += [values.tobytes() for values in llm.score([[5, 9, 2], [7]], [[4, 5], [8]])]
            story += llm.collective_rpc("get_weight_digest")[:1]
            llm.llm_engine.save_sharded_state(tmp_path / f"state of {ranks}")
            assert_clean(llm.llm_engine)
        found.append(story)
    for number, (expected, got) in enumerate(zip(*found, strict=True)):
        assert got == expected, number
    with engine_of(tmp_path / f"state of {num_ranks}", num_ranks, load_format="sharded") as llm:
        assert said(llm) == found[0][2]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_each_rank_keeps_the_states_of_its_own_heads(case):
    architecture, num_ranks, fields = fields_of(case)
    whole, sizes = None, []
    for rank in range(num_ranks):
        module = tiny_model(architecture, attn_implementation=ATTENTION_NAME, **fields)
        swap_mixers(module)
        whole = whole or probe_geometry(module)
        cut = cut_module(module, whole, SimpleNamespace(rank=rank, num_ranks=num_ranks, splits_sums=False, pipe=None))
        assert len(mixers_of(module)) == sum(layer.state is not None for layer in whole)
        states = [layer.state.recurrence for layer in cut.geometry if layer.state and layer.state.recurrence]
        sizes.append([heads for heads, *_ in states])
        assert [share.size for _, share in cut.mixers] == (sizes[-1] if cut.mixers else [])
    expected = [layer.state.recurrence[0] for layer in whole if layer.state and layer.state.recurrence]
    if case == "states whole on 3":
        assert sizes == [expected] * num_ranks
    else:
        assert np.array_equal(np.sum(sizes, 0) if expected else [], expected)
