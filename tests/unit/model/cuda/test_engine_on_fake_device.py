"""Whole engines on the fake device: the same results in every order, no fault, and no wait in a step."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.execution import worker
from rollout_engine.model import backends
from rollout_engine.model.cuda import runner as runner_module
from rollout_engine.model.cuda import upload as upload_module
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.model.cuda.pinned_upload import PinnedUpload
from rollout_engine.model.cuda.runner import CudaRunner
from rollout_engine.model.sampling import logit_rows
from rollout_engine.testing import random_adapter, spelled_token, spelling_state_dict
from rollout_engine.testing.models import tiny_checkpoint, tiny_model
from tests.fake_device.calls import CUDA
from tests.fake_device.device import FakeDevice
from tests.fake_device.plants import Plant
from tests.unit.model.cuda.conftest import OPTIONS

GUARDS_MEMORY = True
"""Harsh memory would be other memory to the fake device: `harsh_if_asked` leaves these tests out."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels have to run in Triton's interpreter")
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 32, "head_dim": 16}
SMALL |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
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
        key = engines["checkpoint"], *options.items()
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
    return fault.kind == "uninitialised" and fault.text.startswith("mm at decoder.py") and "_multiply" in fault.text


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
    """What the host waited for while it launched steps. It may wait for rows that a user's own code draws, and to know
    which drafted tokens were right."""

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
                may = {"_draw_on_host", "_draw_behind_drafts"} & {*wait.functions}
                (self.allowed if may else self.forbidden).append(wait)
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


@pytest.mark.slow
def test_a_step_waits_for_nothing_and_finds_the_same_in_every_order(on_device, monkeypatch):
    waits, found = Waits(), []
    for order in ("lazy", "random"):
        with on_device(max_num_seqs=2) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = order
            llm.reset_prefix_cache()
            found.append(run(llm, DRAWN))
    assert_alike(*found)
    assert waits.forbidden == waits.allowed == []


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


@pytest.mark.slow
def test_adapters_come_and_change_beside_steps_that_wait_for_nothing(on_device, monkeypatch):
    """Of two requests in flight one has an adapter, whose values change between two steps."""
    waits, found, params = Waits(), [], DRAWN.clone(n=1, max_tokens=5)
    for order in ("eager", "lazy", "random"):
        with on_device(max_num_seqs=2) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = order
            core = llm.llm_engine
            llm.reset_prefix_cache()
            base = tiny_model("qwen3", **SMALL)
            core.add_lora(random_adapter(base, "a", seed=1, revision=2 * len(found)))
            requests = [({"prompt_token_ids": ids}, lora) for ids, lora in zip(PROMPTS, ("a", None), strict=True)]
            ids = [core.add_request(str(i), each, params, lora_request=lora) for i, (each, lora) in enumerate(requests)]
            ended = {}
            for number in range(100):
                if number == 3:
                    core.add_lora(random_adapter(base, "a", seed=2, revision=2 * len(found) + 1))
                ended |= {output.request_id: output for output in core.step() if output.finished}
                if not core.has_unfinished_requests():
                    break
            samples = [ended[name].outputs[0] for name in ids]
            assert all(sample.error is None for sample in samples) and len(samples[0].version_spans) == 2
            found.append([(list(sample.token_ids), np.array(sample.logprobs)) for sample in samples])
            core.remove_lora("a")
    for other in found[1:]:
        assert_alike(found[0], other)
    assert [wait for wait in waits.forbidden if "_capture_one" not in wait.functions] == waits.allowed == []


@pytest.mark.slow
def test_only_rows_that_a_users_own_code_draws_make_a_step_wait(on_device, monkeypatch):
    waits, own = Waits(), DRAWN.clone(extra_args={}, n=1)
    with on_device(logits_processors=(f"{__name__}:OnlyOdd",)) as (device, llm), waits.noted(device, llm, monkeypatch):
        assert all(token % 2 for tokens, _ in run(llm, own) for token in tokens)
    assert waits.forbidden == [] and waits.allowed


@pytest.mark.slow
def test_drafts_change_no_bit_in_any_order_beside_graphs(on_device, monkeypatch):
    """Of two sequences one draws edited logits, token after token; steps without drafts are replayed."""
    params = DRAWN.clone(n=1, max_tokens=5)
    asked, waits, found = [params, params.clone(presence_penalty=1.0)], Waits(), []
    options = dict(deterministic=True, speculation=SpeculationConfig(max_draft_tokens=3), max_num_seqs=2)
    for order in ("eager", "lazy", "random"):
        with on_device(**options) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = order
            core = llm.frontend.client.driver.core
            costs = core._scheduler.speculator._costs
            costs.of = costs.with_drafts = lambda num_rows: 1.0  # every draft pays
            llm.reset_prefix_cache()
            found.append(run(llm, [each.clone(speculation=False) for each in asked]))
            before = sum(core.stats.drafts.num_accepted)
            found += [run(llm, asked) for _ in range(2)]
            assert sum(core.stats.drafts.num_accepted) > before
    for other in found[1:]:
        assert [tokens for tokens, _ in other] == [tokens for tokens, _ in found[0]]
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(other, found[0], strict=True))
    assert waits.forbidden == [] and waits.allowed


IN_A_STEP = "return _Computed(logits, next(arrived), CudaDraws.of(draws, list(arrived)), None)"
WAITS = {
    "scalar read": Plant(CudaRunner, "_compute", IN_A_STEP, f"logits.take(slice(1)).max().item(); {IN_A_STEP}"),
    "scalar read for a condition": Plant(CudaRunner, "_compute", IN_A_STEP, f"bool((lens > 0).all()); {IN_A_STEP}"),
    "nonzero": Plant(CudaRunner, "_compute", IN_A_STEP, f"(token_ids < 0).nonzero(); {IN_A_STEP}"),
    "boolean mask": Plant(CudaRunner, "_compute", IN_A_STEP, f"lens[lens > 0]; {IN_A_STEP}"),
    "unpinned copy": Plant(upload_module, "upload", 'pin_memory=device.type == "cuda"', "pin_memory=False"),
    "unpinned copy to the host": Plant(CudaRunner, "_compute", IN_A_STEP, f"lens.tolist(); {IN_A_STEP}"),
    "unpinned copy of a number": Plant(
        CudaRunner, "_compute", IN_A_STEP, f"torch.tensor([1], device=lens.device); {IN_A_STEP}"
    ),
    "blocking copy": Plant(upload_module, "upload", "packed.to(device, non_blocking=True)", "packed.to(device)"),
    "event": Plant(upload_module.Download, "__init__", "self._event.record()", "self._event.record(); self.wait()"),
    "device": Plant(CudaRunner, "_compute", IN_A_STEP, f"torch.cuda.synchronize(); {IN_A_STEP}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_planted_in_a_step_is_found(on_device, monkeypatch, name):
    waits, one = Waits(), DRAWN.clone(n=1, max_tokens=1)
    with on_device(max_num_seqs=2) as (device, llm), WAITS[name].planted(), waits.noted(device, llm, monkeypatch):
        device.timeline.order = "eager"
        if WAITS[name].name == "upload":
            monkeypatch.setattr(runner_module, "upload", upload_module.upload)
        llm.reset_prefix_cache()
        run(llm, one, [[7, 8, 9]])
    assert waits.forbidden, "found"
    assert all(name.startswith(wait.kind) for wait in waits.forbidden), waits.forbidden


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma2", {"max_num_seqs": 3}),  # layers run as modules
        ("qwen3", {"deterministic": True, "max_num_seqs": 2}),
        ("qwen3_moe", {"max_num_seqs": 2}),
        ("qwen3", {"num_kv_blocks": 4, "block_size": 16, "enable_prefix_caching": False}),
    ],
    ids=["modules", "deterministic", "mixture", "preempted"],
)
def test_other_engines_have_no_fault_either_and_wait_for_nothing(
    on_device, monkeypatch, tmp_path, engines, architecture, options
):
    monkeypatch.setitem(engines, "checkpoint", tiny_checkpoint(tmp_path, architecture, **SMALL))
    waits, found = Waits(), []
    num_tokens = 18 if "num_kv_blocks" in options else 3
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
    params = params.clone(return_routed_experts=architecture == "qwen3_moe")
    for order in ("lazy", "random"):
        with on_device(**options) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = order
            llm.reset_prefix_cache()
            found.append(run(llm, params, [[5 + i, 6, 7] for i in range(4)]))
            assert ("num_kv_blocks" in options) == (llm.llm_engine.stats.num_preemptions > 0)
    assert_alike(*found)
    assert waits.forbidden == waits.allowed == []


@pytest.mark.slow
def test_logits_in_pieces_make_no_step_wait(on_device, monkeypatch):
    waits, found = Waits(), []
    for rows in (100, 2):
        monkeypatch.setattr(logit_rows, "_DEVICE_PIECE_NUMEL", rows * 259)
        with on_device(max_num_seqs=2) as (device, llm), waits.noted(device, llm, monkeypatch):
            device.timeline.order = "random"
            llm.reset_prefix_cache()
            found.append(run(llm, DRAWN.clone(n=4)))
    assert_alike(*found)
    assert waits.forbidden == waits.allowed == []


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_weights_are_updated_beside_steps_and_survive_a_sleep(on_device, monkeypatch, staging):
    """From the host, by pinned buffers, then from the device's own memory; every step's log-probs are those of whole
    weights."""
    upload, uploaded = PinnedUpload.__call__, []
    noted = lambda self, out, fill: uploaded.append(out) or upload(self, out, fill)  # noqa: E731
    monkeypatch.setattr(PinnedUpload, "__call__", noted)
    with on_device(max_num_seqs=2) as (device, llm):
        device.timeline.order = "random"
        llm.reset_prefix_cache()
        before = run(llm, DRAWN)
        given = llm.llm_engine.apply_model(lambda module: {k: v.cpu() for k, v in module.state_dict().items()})[0]
        changed = {name: tensor * 1.5 if "norm" in name else tensor for name, tensor in given.items()}
        for weights in (changed, {name: tensor.pin_memory().to(CUDA) for name, tensor in given.items()}):
            report = llm.update_weights(weights, staging=staging)
            assert report.digest == llm.collective_rpc("get_weight_digest")[0] and report.staging == staging
            assert sum(out.nbytes for out in uploaded) >= sum(tensor.nbytes for tensor in changed.values())
            for _ in range(2):
                after = run(llm, DRAWN)
            llm.sleep(1)
            llm.wake_up()
            llm.reset_prefix_cache()
            assert_alike(run(llm, DRAWN), after)
        assert_alike(after, before)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["lazy", "random"])
def test_weights_come_from_another_thread_while_steps_run_and_every_token_is_of_its_version(on_device, order):
    model, failures = tiny_model(**SMALL), []
    with on_device(max_num_seqs=2) as (device, llm):
        device.timeline.order, first = order, llm.policy_version + 1
        llm.update_weights(spelling_state_dict(model, first))

        def push():
            try:
                for version in range(first + 1, first + 4):
                    llm.update_weights(spelling_state_dict(model, version), kv="recompute", staging="shadow")
            except Exception as problem:
                failures.append(problem)

        pusher, seen = threading.Thread(target=push), set()
        pusher.start()
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        while True:
            is_last = not pusher.is_alive()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9, 12])], params, use_tqdm=False)
            for output in (each.outputs[0] for each in outputs):
                assert output.error is None and len(output.token_ids) == 8
                for span in output.version_spans:
                    assert set(output.token_ids[span.start : span.end]) == {spelled_token(span.policy_version)}
                    seen.add(span.policy_version)
            if is_last:
                break
        pusher.join()
    assert not failures and seen >= {first + 3}
