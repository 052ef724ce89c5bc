"""Whole engines on the fake device: the same results in every order, no fault, and no wait in a step."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.execution import worker
from rollout_engine.kernels.truncation import most_likely
from rollout_engine.model import backends
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.testing.models import tiny_checkpoint
from tests.fake_device.calls import CUDA
from tests.fake_device.device import FakeDevice
from tests.unit.model.cuda.conftest import OPTIONS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels have to run in Triton's interpreter")
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 32, "head_dim": 16}
PROMPTS = [[7, 8, 9], list(range(40, 60))]


class OnlyOdd:
    """A user's own code."""

    def __init__(self, vocab_size):
        pass

    def wants(self, params):
        return params.extra_args is not None

    def apply(self, logits, sequence):
        logits[::2] = -torch.inf
        return logits


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Devices and engines made so far, by options, and the checkpoint of all."""
    made = {"checkpoint": tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", **SMALL)}
    yield made
    for device, llm in (pair for key, pair in made.items() if key != "checkpoint"):
        with device:
            llm.shutdown()


@pytest.fixture
def on_device(monkeypatch, engines):
    """A context manager: (device, engine), one for all that ask alike; in the end there must be no fault."""
    where = backends.Device(CUDA, CudaBackend)
    monkeypatch.setattr(worker, "device_of", lambda config: where)

    @contextmanager
    def enter(**options):
        key = tuple(options.items())
        if key not in engines:
            device = FakeDevice(seed=3)
            with device:
                llm = LLM(str(engines["checkpoint"]), **(OPTIONS | {"device": "cuda"} | options))
                device.finish()
            engines[key] = device, llm
        device, llm = engines[key]
        device.faults.clear()
        with device:
            yield device, llm
            device.finish()
        assert [fault for fault in device.faults if not is_padding(fault)] == []

    return enter


def is_padding(fault):
    """Attention writes nothing for the rows that pad a graph's batch, products go over them, and nobody reads them."""
    return fault.kind == "uninitialised" and fault.text.startswith("mm at decoder.py") and "_product" in fault.text


def run(llm, params, prompts=PROMPTS):
    """(tokens, log-probs) of every completion."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert all(sample.error is None for output in outputs for sample in output.outputs)
    return [(list(sample.token_ids), np.array(sample.logprobs)) for output in outputs for sample in output.outputs]


def assert_alike(ours, theirs):
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


class Waits:
    """What the host waited for while it launched steps. A wait for rows that a user's own code draws is allowed."""

    def __init__(self):
        self.forbidden, self.allowed = [], []

    @contextmanager
    def noted(self, device, llm, monkeypatch):
        runner = llm.frontend.client.driver.executor.worker.runner
        submit = runner.submit

        def submitted(work):
            before = len(device.waits_seen)
            result = submit(work)
            for wait in device.waits_seen[before:]:
                (self.allowed if "_draw_on_host" in wait.functions else self.forbidden).append(wait)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(runner, "submit", submitted)
            yield


DRAWN = SamplingParams(temperature=0.8, max_tokens=2, logprobs=0, n=2, seed=3, ignore_eos=True)
OTHER = {
    "truncated": SamplingParams(temperature=0.8, top_p=0.9, logprobs=2, seed=1),
    "edited": SamplingParams(temperature=0.7, presence_penalty=1.0, logit_bias={7: 4.0}, logprobs=0, seed=2),
    "raw": SamplingParams(temperature=1.5, logprobs=1, logprobs_mode="raw", seed=3),
    "processed": SamplingParams(temperature=0.6, min_p=0.02, logprobs=2, logprobs_mode="processed", seed=4),
    "prompt": SamplingParams(temperature=0.6, prompt_logprobs=2, logprobs=0, seed=5),
}


def test_a_step_waits_for_nothing_and_finds_the_same_in_every_order(on_device, monkeypatch):
    waits, found = Waits(), []
    for order in ("lazy", "random"):
        with on_device(max_num_seqs=2) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = order
            llm.reset_prefix_cache()
            found.append(run(llm, DRAWN))
    assert_alike(*found)
    assert waits.forbidden == waits.allowed == []


def test_the_most_likely_tokens_are_found_without_waiting_and_ties_go_to_lower_ids():
    logits = torch.randint(-3, 3, (5, 40), generator=torch.Generator().manual_seed(1)).float()
    with FakeDevice() as device:
        on_device = logits.pin_memory().to(CUDA, non_blocking=True)
        found = most_likely(on_device, 7)
        assert device.waits_seen == []
        assert found.tolist() == most_likely(logits, 7).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER)
def test_nothing_that_is_asked_for_makes_a_step_wait(on_device, monkeypatch, name):
    waits, found, params = Waits(), [], OTHER[name].clone(max_tokens=3, ignore_eos=True)
    for order in ("lazy", "random"):
        with on_device(max_num_seqs=2) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = order
            llm.reset_prefix_cache()
            found.append(run(llm, params))
    assert_alike(*found)
    assert waits.forbidden == waits.allowed == []
