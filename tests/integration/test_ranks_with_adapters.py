"""Adapters and drafted tokens of a model cut over ranks: what one process computes under them, to the bit."""

import gc

import numpy as np
import pytest
import torch

from rollout_engine import LLM, LoRARequest, SamplingParams, exact
from rollout_engine.base.errors import EngineDeadError, LifecycleError, RequestError
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import assert_clean, random_adapter, save_adapter, tiny_checkpoint, tiny_model
from tests.unit.peft_layers import PeftModel

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")]
PARAMS = SamplingParams(max_tokens=10, n=2, ignore_eos=True, logprobs=1, prompt_logprobs=0, seed=3)
PROMPTS = [{"prompt_token_ids": list(range(3, 45))}, {"prompt_token_ids": [7, 8, 9]}]
COMPANY = [(0, "a"), (1, None), (0, "b"), (0, None), (1, "b"), (1, "a")]
"""(prompt, adapter)."""


def adapter(architecture, name, **options):
    return random_adapter(tiny_model(architecture), name, **({"seed": ord(name[0])} | options))


def said(llm, company=COMPANY):
    """Bits of what an engine says to prompts under adapters, all at once."""
    outputs = llm.generate(
        [PROMPTS[p] for p, _ in company], PARAMS, lora_request=[a for _, a in company], use_tqdm=False
    )
    found = [np.asarray(output.prompt_logprobs).tobytes() for output in outputs]
    for sample in (sample for output in outputs for sample in output.outputs):
        found += [list(sample.token_ids), sample.logprobs.tobytes(), repr(sample.version_spans)]
    return found


def scored(llm, lora=None):
    return [each.tobytes() for each in llm.score([[5, 9, 2], [7]], [[4, 5], [8]], lora=lora)]


def live(llm):
    return [(info.name, info.digest, info.num_bytes, info.policy_version) for info in llm.list_loras()]


def story(llm, architecture, directory):
    """What an engine says while adapters come, change and go, and weights change under them."""
    found = [said(llm, [(0, None)])]
    llm.add_lora(adapter(architecture, "a"))
    llm.add_lora(save_adapter(directory, adapter(architecture, "b", rank=20, alpha=3.0)))
    found += [live(llm), said(llm), scored(llm, "a"), scored(llm, "b"), scored(llm)]
    llm.add_lora(adapter(architecture, "a", seed=9, revision=1))
    found += [live(llm), said(llm)]
    llm.update_weights(tiny_model(architecture, seed=5))
    found += [said(llm), scored(llm, "a")]
    llm.sleep(level=1)
    llm.wake_up()
    found.append(said(llm))
    llm.remove_lora("b")
    found += [said(llm, [each for each in COMPANY if each[1] != "b"])]
    llm.remove_lora("a")
    found += [live(llm), said(llm, [(0, None)]), scored(llm)]
    return found


def compare(tmp_path, architecture, dtype, num_ranks):
    path = str(tiny_checkpoint(tmp_path / "model", architecture))
    options = dict(skip_tokenizer_init=True, log_stats=False, num_kv_blocks=48, max_num_batched_tokens=64, dtype=dtype)
    found = []
    for ranks in (1, num_ranks):
        options |= dict(tensor_parallel_size=ranks, max_loras=2, max_lora_rank=32)
        speculation = "off" if ranks == 1 else SpeculationConfig(max_draft_tokens=3)
        with LLM(path, speculation=speculation, **options) as llm:
            core = llm.frontend.client.driver.core
            if ranks > 1:
                core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
            found.append(story(llm, architecture, tmp_path / "adapter"))
            assert ranks == 1 or sum(core.stats.drafts.num_accepted) > 0
            assert_clean(llm.llm_engine)
    for number, (expected, got) in enumerate(zip(*found, strict=True)):
        assert got == expected, f"part {number} differs"


@pytest.mark.slow
def test_two_ranks_that_draft_say_what_one_process_says_under_adapters(tmp_path):
    compare(tmp_path, "qwen3", "bfloat16", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype", "num_ranks"),
    [("llama", "float32", 2), ("mixtral", "bfloat16", 2), ("gemma3_text", "float32", 2), ("qwen2", "float32", 2)],
)
def test_layers_that_run_as_modules_and_experts_take_adapters_too(tmp_path, architecture, dtype, num_ranks):
    compare(tmp_path, architecture, dtype, num_ranks)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3"))
    with LLM(
        path, tensor_parallel_size=2, skip_tokenizer_init=True, log_stats=False, num_kv_blocks=48, max_loras=1
    ) as llm:
        yield llm


@pytest.mark.slow
def test_a_refused_adapter_changes_nothing_on_any_rank(two):
    before = said(two, [(0, None)])
    wrong = adapter("qwen3", "wrong")
    name = next(each for each in wrong.tensors if each.endswith("lora_B.weight"))
    tensors = wrong.tensors | {name: wrong.tensors[name][:-1]}
    with pytest.raises(RequestError, match="the adapter is of another base model"):
        two.add_lora(LoRARequest("wrong", tensors=tensors, config=wrong.config))
    tensors = wrong.tensors | {name: wrong.tensors[name] * float("nan")}
    with pytest.raises(RequestError, match="NaN or infinite"):
        two.add_lora(LoRARequest("wrong", tensors=tensors, config=wrong.config))
    assert two.list_loras() == [] and said(two, [(0, None)]) == before


def test_ranks_forget_adapters_that_nobody_can_install_any_more(two):
    ranks = two.llm_engine.frontend.client.driver.executor._adapters
    for seed in range(4):
        two.add_lora(adapter("qwen3", f"n{seed}", seed=seed))
        gc.collect()
        assert len(ranks._told) <= 2, "the one that was just prepared, and the one that it replaced"
    two.pin_lora("n3")
    with pytest.raises(LifecycleError, match="no slot is free"):
        two.add_lora(adapter("qwen3", "other"))
    two.remove_lora("n3")


def test_a_trainer_sends_its_adapter_alone_and_finds_its_own_log_probs(two):
    trainer = exact.enable(PeftModel(tiny_model("qwen3")))
    for _ in range(2):
        report = two.update_weights(trainer, merge=False)
        [info] = two.list_loras()
        assert report.num_tensors == 2 * len(trainer.adapters()) and report.version == info.policy_version
        (output,) = two.generate(PROMPTS[1:], PARAMS.clone(n=1), lora_request=info.name, use_tqdm=False)
        (sample,) = output.outputs
        ids = torch.tensor([PROMPTS[1]["prompt_token_ids"] + sample.token_ids])
        with torch.no_grad():
            wanted = exact.token_logprobs(trainer, ids)[0, 2:]
        assert wanted.numpy().tobytes() == sample.logprobs.tobytes()
        with torch.no_grad():
            trainer.adapters()[0].lora_B["default"].weight.mul_(1.5)
    two.remove_lora(info.name)


def test_ranks_whose_adapters_may_differ_compute_no_more(two, monkeypatch):
    """The last test: the engine has ended."""
    own = two.llm_engine.frontend.client.driver.executor._adapters._own
    monkeypatch.setattr(own, "put", lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises((MemoryError, EngineDeadError), match="no room"):
        two.add_lora(adapter("qwen3", "late"))
    with pytest.raises(EngineDeadError, match=r"install_adapter failed on a rank \(MemoryError: no room\)"):
        said(two, [(0, None)])
