"""Adapters of requests on a device: beside one another, through updates, and with the bits of an exact trainer."""

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rollout_engine import SamplingParams, exact
from rollout_engine.base.errors import LifecycleError
from rollout_engine.exact import enabling as exact_enabling
from rollout_engine.model.cuda.row_invariance import ARITHMETIC
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from tests.unit.model.cuda.test_engine import Rerun, graphs_by, runner_of
from tests.unit.peft_layers import PeftModel

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
PROMPTS = [[7, 8, 9], list(range(40, 62)), [5, 6]]
DRAWN = SamplingParams(temperature=0.8, max_tokens=3, logprobs=0, seed=3, ignore_eos=True)


def run(llm, prompts, loras, params=DRAWN):
    """(tokens, bits of log-probs) of each prompt under its adapter."""
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    assert [output.outputs[0].error for output in outputs] == [None] * len(prompts)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs.tobytes()) for o in outputs]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A function from an architecture to a checkpoint of it, as small as can be."""

    def get(architecture):
        return tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **SMALL)

    return cache(get)


@pytest.fixture
def trainer(monkeypatch, device, checkpoints):
    """The checkpoint with an adapter, exact as on a device."""
    model = PeftModel(AutoModelForCausalLM.from_pretrained(str(checkpoints("qwen3"))), rank=5)
    monkeypatch.setattr(exact_enabling, "arithmetic_of", lambda _: ARITHMETIC)
    return exact.enable(model.to(device))


@pytest.mark.slow
def test_requests_have_their_own_adapters_whatever_runs_beside_them(engine_on):
    llm = engine_on("device", deterministic=True)
    base = run(llm, PROMPTS, None)
    llm.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=1, rank=3))
    llm.add_lora(random_adapter(tiny_model(**SMALL), "b", seed=2, targets=("q_proj", "down_proj")))
    alone = [run(llm, [ids], name)[0] for ids, name in zip(PROMPTS, ("a", None, "b"), strict=True)]
    assert run(llm, PROMPTS, ["a", None, "b"]) == alone
    assert alone[0] != base[0] and alone[1] == base[1] and alone[2] != base[2]
    llm.remove_lora("a")
    llm.remove_lora("b")
    assert run(llm, PROMPTS, None) == base


@pytest.mark.slow
def test_an_exact_trainer_has_the_bits_of_its_adapter_and_scores_too(engine_on, trainer):
    llm = engine_on("device", deterministic=True)
    llm.add_lora(trainer.request("x"))
    sampled = run(llm, PROMPTS, "x")
    sequences = [torch.tensor(ids + tokens) for ids, (tokens, _) in zip(PROMPTS, sampled, strict=True)]
    batch = pad_sequence(sequences, batch_first=True, padding_value=0)
    mask = pad_sequence([torch.ones_like(each) for each in sequences], batch_first=True)
    found = exact.token_logprobs(trainer, batch, mask, temperature=0.8)
    scores = llm.score(PROMPTS, [tokens for tokens, _ in sampled], temperature=0.8, lora="x")
    for row, ids, (tokens, logprobs), score in zip(found.detach(), PROMPTS, sampled, scores, strict=True):
        assert row[len(ids) - 1 : len(ids) + len(tokens) - 1].numpy().tobytes() == logprobs
        assert np.asarray(score).tobytes() == logprobs
    found.sum().backward()
    assert all(bool(p.grad.any()) for name, p in trainer.named_parameters() if "lora_" in name)
    llm.remove_lora("x")


@pytest.mark.slow
def test_graphs_compute_adapters_too(engine_on):
    llm, captured = engine_on("device", deterministic=True), []
    for seed in (1, 9):
        llm.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=seed, revision=seed))
    llm.add_lora(random_adapter(tiny_model(**SMALL), "b", seed=2, targets=("q_proj",)))
    loras = ["a", None, "b"]
    plain = run(llm, PROMPTS, loras)
    with graphs_by(lambda compute: captured.append(Rerun(compute)) or captured[-1], runner_of(llm), sizes=[4]):
        assert run(llm, PROMPTS, loras) == plain
        llm.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=1, revision=10))
        other = run(llm, PROMPTS, loras)
        assert len(captured) == 1, "new values are read from the same tables"
        assert other != plain and other[1:] == plain[1:]
        llm.remove_lora("a")
        assert run(llm, PROMPTS, [None, None, "b"])[1:] == plain[1:]
        assert len(captured) == 2
        llm.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=1, revision=11))
        assert run(llm, PROMPTS, loras) == other
        assert len(captured) == 3, "tables made anew are elsewhere"
    llm.remove_lora("b")


@pytest.mark.slow
def test_an_adapter_that_changes_in_flight_is_a_new_version(engine_on):
    found = []
    for place in ("device", "cpu"):
        core = engine_on(place, async_scheduling=False).llm_engine
        core.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=1))
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        ids = [core.add_request(str(i), each, DRAWN, lora_request="a") for i, each in enumerate(requests)]
        core.step()
        core.step()
        core.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=9, revision=1))
        ended = {}
        while core.has_unfinished_requests():
            ended |= {output.request_id: output for output in core.step() if output.finished}
        samples = [ended[name].outputs[0] for name in ids]
        found.append([(list(s.token_ids), [span.policy_version for span in s.version_spans]) for s in samples])
        core.remove_lora("a")
    assert all(len(versions) == 2 for _, versions in found[0])
    assert found[0] == found[1]


def test_layers_that_run_as_modules_compute_no_adapters(engine_on):
    with pytest.raises(LifecycleError, match="layers run as modules on a device"):
        engine_on("device", "gemma2").add_lora(random_adapter(tiny_model("gemma2", **SMALL), "a"))


@pytest.mark.slow
def test_adapters_are_not_computed_while_layers_are_watched(engine_on):
    llm = engine_on("device", deterministic=True)
    llm.add_lora(random_adapter(tiny_model(**SMALL), "a", seed=1))
    worker = llm.frontend.client.driver.executor.worker
    end = worker.watch_layers(lambda layer, states: None)
    try:
        (output,) = llm.generate([{"prompt_token_ids": [5]}], DRAWN, lora_request="a", use_tqdm=False)
        assert "while layers are watched" in str(output.outputs[0].error)
    finally:
        end()
        llm.remove_lora("a")
