"""Drafted tokens change no bit of requests under LoRA adapters, grammars, penalties and updates, all in one batch."""

import pytest

from rollout_engine import LLM, SamplingParams, SpeculationConfig
from rollout_engine.testing import assert_clean, random_adapter, tiny_checkpoint, tiny_model
from tests.parity.test_speculation import describe

PROMPTS = ["Once upon", "abcabcabc" * 6, "zz", "Once upon"]
LORAS = ["a", None, "b", "a"]
SETTINGS = [
    dict(logprobs=3, prompt_logprobs=2),
    dict(logprob_token_ids=[3, 70, 80], temperature=0.3),
    dict(logprobs=1, temperature=0.6, bad_words=["ab", "c"], repetition_penalty=1.3, frequency_penalty=0.5),
    dict(temperature=0.4, stop=["ab", "Q"], min_tokens=10, allowed_token_ids=[67, 68, 69, 2]),
    dict(structured_outputs={"json": {"type": "array", "items": {"type": "integer"}}}, presence_penalty=0.4),
]


def adapter(name, **options):
    return random_adapter(tiny_model(), name, seed=ord(name), std=0.1, **options)


def generated(path, speculation, sizes):
    """(what each sample holds, how many drafts were right): two epochs; weights and an adapter change between."""
    found = []
    with LLM(path, speculation=speculation, log_stats=False, max_loras=2, **sizes) as llm:
        core = llm.frontend.client.driver.core
        if speculation != "off":
            speculator = core._scheduler.speculator
            speculator._costs.of = lambda num_rows: 1.0  # every draft pays
            for costs, seconds in (speculator.model._costs, 1.0), (speculator.model._draft_costs, 1e-6):
                costs.of = lambda num_rows, seconds=seconds: seconds
        llm.add_lora(adapter("a"))
        llm.add_lora(adapter("b"))
        for epoch in range(2):
            for settings in SETTINGS:
                params = SamplingParams(n=3, max_tokens=24, seed=5, **settings)
                outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=LORAS)
                found += [(repr(out.prompt_logprobs), *map(describe, out.outputs)) for out in outputs]
            if epoch == 0:
                llm.update_weights(tiny_model(seed=4))
                llm.add_lora(adapter("a", rank=4, revision=1))
        assert_clean(llm.llm_engine)
        return found, sum(core.stats.drafts.num_accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(), id="roomy", marks=pytest.mark.slow),
        pytest.param(dict(num_kv_blocks=20, max_model_len=200), id="preempted"),
    ],
)
def test_drafts_change_no_bit_beside_adapters_grammars_and_updates(tmp_path, sizes):
    pytest.importorskip("llguidance")
    path = tiny_checkpoint(tmp_path)
    expected, _ = generated(path, "off", sizes)
    found, num_accepted = generated(path, SpeculationConfig(max_draft_tokens=3, draft_model=path), sizes)
    assert found == expected and num_accepted > 50
