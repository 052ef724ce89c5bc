"""The engine on a CUDA device: graphs, memory, bits."""

import asyncio
import re
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import sync  # noqa: E402
from rollout_engine import LLM, AsyncLLM, ConfigError, SamplingParams, exact  # noqa: E402
from rollout_engine.testing.models import tiny_checkpoint  # noqa: E402
from sync.manifest import WeightManifest  # noqa: E402
from sync.store import StoreReceiver  # noqa: E402
from tests.unit.peft_layers import PeftModel  # noqa: E402

HAS_DEVICE = torch.cuda.is_available()
on_device = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")]
PROMPTS = [[(7 * i + j) % 250 + 3 for j in range(20 + 37 * i)] for i in range(12)]
DRAWN = SamplingParams(temperature=0.9, max_tokens=40, logprobs=0, seed=1, ignore_eos=True)
TRAINER = """
import sys, msgspec, torch, transformers, sync
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).to("cuda")
weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
sender = sync.make_sender("ipc", directory=sys.argv[2])
for version, factor in ((1, 0.5), (2, 1.0)):
    offered = {name: tensor * factor if "norm" in name else tensor for name, tensor in weights.items()}
    print(msgspec.json.encode(sender.offer(offered, version, {})).decode(), flush=True)
    sender.send()
sender.close()
"""
"""Offers other weights, then those of the checkpoint."""
OPTIONS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "num_kv_blocks": 600,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "log_stats": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), **sizes, std=0.05, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A checkpoint of a mixture of experts, of which some get more than a tile of rows, and others few."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
    return str(tiny_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **sizes, max_position_embeddings=2048))


@pytest.fixture
def engine(checkpoint):
    """A function from options to an `LLM` on the device."""
    made = []

    def build(path=checkpoint, **options):
        made.append(LLM(path, **(OPTIONS | options)))
        return made[-1]

    yield build
    for each in made:
        each.shutdown()


def run(llm, params=DRAWN, prompts=PROMPTS):
    """(tokens, log-probs) of each prompt."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert [output.outputs[0].error for output in outputs] == [None] * len(prompts)
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs.tolist()) for output in outputs]


@pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="device='cuda' is not possible: .*Use device='cpu'"):
        LLM(str(tiny_checkpoint(tmp_path)), device="cuda", skip_tokenizer_init=True)


def assert_fused_and_captured(choices):
    """`choices`: the engine's, in words; layers run by our kernels, and every graph was captured."""
    captured, wanted = re.search(r"graphs (\d+) of (\d+)", choices).groups()
    assert "decoder fused" in choices and captured == wanted != "0"


class TestOnADevice:
    pytestmark = on_device

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_layers_are_fused_and_every_graph_is_captured(self, engine, caplog, deterministic):
        """A kernel that does not compile here, or a capture that fails, would only make steps slower."""
        choices = engine(deterministic=deterministic).frontend.client.info.choices
        warned = [r for r in caplog.records if r.levelname == "WARNING" and r.module != "build"]  # of the CPU's kernels
        assert not warned
        assert_fused_and_captured(choices)

    def test_deterministic_bits_are_those_of_any_batch_graph_and_order(self, engine):
        with_graphs = engine(deterministic=True)
        together = run(with_graphs)
        assert run(engine(deterministic=True, cuda_graphs=False, async_scheduling=False)) == together
        with_graphs.reset_prefix_cache()
        chunked = engine(deterministic=True, max_num_batched_tokens=48)
        assert run(chunked) == together
        assert [run(with_graphs, prompts=[ids])[0] for ids in PROMPTS] == together

    def test_edited_draws_are_those_of_any_batch_graph_and_order(self, engine):
        own = {"max_tokens": 40, "logprobs": 2, "ignore_eos": True}
        params = [
            SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, seed=1, **own),
            SamplingParams(allowed_token_ids=list(range(0, 250, 3)), top_p=0.9, seed=2, **own),
            SamplingParams(frequency_penalty=0.5, top_k=20, logprobs_mode="processed", seed=3, **own),
            SamplingParams(logit_bias={5: 3.0}, temperature=0.7, logprobs_mode="raw", seed=4, **own),
            SamplingParams(temperature=0.0, seed=5, **own),
        ]
        with_graphs = engine(deterministic=True)
        together = run(with_graphs, params, PROMPTS[:5])
        assert (
            run(engine(deterministic=True, cuda_graphs=False, async_scheduling=False), params, PROMPTS[:5]) == together
        )
        alone = [run(with_graphs, *pair) for pair in zip(params, ([ids] for ids in PROMPTS), strict=False)]
        assert [each for (each,) in alone] == together

    def test_drafted_tokens_change_no_bit(self, engine):
        """Of rows that are edited, too. The second time the first has what is to be drafted."""
        own = {"max_tokens": 40, "logprobs": 0, "ignore_eos": True}
        params = [DRAWN, SamplingParams(presence_penalty=1.0, seed=2, **own), SamplingParams(top_p=0.9, seed=3, **own)]
        drafting = engine(deterministic=True, speculation="auto")
        core = drafting.frontend.client.driver.core
        costs = core._scheduler.speculator._costs
        costs.of = costs.with_drafts = lambda num_rows: 1.0  # every draft pays
        expected = run(engine(deterministic=True), params, PROMPTS[:3])
        assert [run(drafting, params, PROMPTS[:3]) for _ in range(2)] == [expected] * 2
        assert sum(core.stats.drafts.num_accepted) > 60

    def test_drawn_tokens_have_the_logprobs_that_scoring_gives_them(self, engine):
        llm = engine(deterministic=True)
        drawn = run(llm)
        scores = llm.score(PROMPTS, [tokens for tokens, _ in drawn], temperature=DRAWN.temperature)
        assert [each.tolist() for each in scores] == [logprobs for _, logprobs in drawn]

    def test_candidates_are_parts_of_the_log_softmax_that_steps_compute(self, engine):
        llm = engine(deterministic=True)
        drawn = [tokens for tokens, _ in run(llm)]
        own = [[token, 5] for tokens in drawn for token in tokens]
        found = llm.score_candidates(PROMPTS, drawn, own, top_k=4, temperature=DRAWN.temperature)
        assert found.candidates[:, 0].tolist() == found.logprobs.tolist()
        params = SamplingParams(max_tokens=1, prompt_logprobs=4, temperature=DRAWN.temperature)
        whole = llm.generate([p + t for p, t in zip(PROMPTS, drawn, strict=True)], params, use_tqdm=False)
        top = [
            np.concatenate([each.prompt_top_logprobs[i][len(p) :] for each, p in zip(whole, PROMPTS, strict=True)])
            for i in (0, 1)
        ]
        assert np.array_equal(found.top_ids, top[0]) and np.array_equal(found.top_logprobs, top[1])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_logprobs_are_the_exact_trainers_bits_and_it_has_gradients(self, engine, checkpoint, dtype):
        drawn = run(engine(deterministic=True, dtype=dtype))
        trainer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to("cuda")
        trainer = exact.enable(trainer)
        ids = pad_sequence([torch.tensor(p + t) for p, (t, _) in zip(PROMPTS, drawn, strict=True)], batch_first=True)
        lengths = torch.tensor([len(p) + len(t) for p, (t, _) in zip(PROMPTS, drawn, strict=True)])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        theirs = exact.token_logprobs(trainer, ids.cuda(), mask.cuda(), temperature=DRAWN.temperature)
        for row, prompt, (tokens, logprobs) in zip(theirs.tolist(), PROMPTS, drawn, strict=True):
            assert row[len(prompt) - 1 :][: len(tokens)] == logprobs
        theirs.sum().backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in trainer.parameters())

    def test_a_mixture_has_the_bits_of_any_batch_and_graph_and_of_an_exact_trainer(self, engine, mixture):
        llm = engine(mixture, deterministic=True)
        assert_fused_and_captured(llm.frontend.client.info.choices)
        together = run(llm)
        assert [run(llm, prompts=[ids])[0] for ids in PROMPTS] == together
        assert run(engine(mixture, deterministic=True, cuda_graphs=False, max_num_batched_tokens=48)) == together
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16).to("cuda"))
        for prompt, (tokens, logprobs) in zip(PROMPTS, together, strict=True):
            ids = torch.tensor([prompt + tokens], device="cuda")
            values = exact.token_logprobs(trainer, ids, temperature=DRAWN.temperature)[0, len(prompt) - 1 :]
            assert values.tolist() == logprobs
        values.sum().backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in trainer.parameters())

    def test_adapters_have_the_bits_of_an_exact_trainer_by_graphs_and_without(self, engine, checkpoint):
        """Tokens of two adapters and of the base in one batch; then one is pushed anew."""
        trainer = exact.enable(PeftModel(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)).cuda())
        loras = ["x", None, "y"] * (len(PROMPTS) // 3)
        requests = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found = []
        for cuda_graphs in (True, False):
            llm = engine(deterministic=True, cuda_graphs=cuda_graphs)
            llm.add_lora(trainer.request("y"))
            llm.add_lora(trainer.request("x"))
            outputs = llm.generate(requests, DRAWN, lora_request=loras, use_tqdm=False)
            assert [output.outputs[0].error for output in outputs] == [None] * len(PROMPTS)
            found.append([(list(o.outputs[0].token_ids), o.outputs[0].logprobs.tolist()) for o in outputs])
        assert found[0] == found[1] and found[0][0] != run(llm)[0]
        tokens, logprobs = found[0][0]
        ids = torch.tensor([PROMPTS[0] + tokens], device="cuda")
        values = exact.token_logprobs(trainer, ids, temperature=DRAWN.temperature)[0, len(PROMPTS[0]) - 1 :]
        assert values.tolist() == logprobs
        values.sum().backward()
        assert all(bool(p.grad.any()) for name, p in trainer.named_parameters() if "lora_" in name)

    def test_float32_tokens_are_those_of_the_cpu(self, engine):
        greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
        ours, theirs = (run(engine(device=where, dtype="float32"), greedy) for where in ("cuda", "cpu"))
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        for (_, mine), (_, other) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), atol=1e-3, rtol=0)

    def test_sleep_gives_memory_back_to_the_driver_and_graphs_follow_it_home(self, engine):
        llm = engine(num_kv_blocks=60_000, deterministic=True)
        before, awake = run(llm), torch.cuda.mem_get_info()[0]
        (usage,) = llm.collective_rpc("get_memory_usage")
        for _ in range(2):
            llm.sleep(1)
            assert torch.cuda.mem_get_info()[0] - awake > 0.9 * (usage["kv_cache"] + usage["weights"])
            assert llm.collective_rpc("get_memory_usage")[0]["weights"] == 0
            llm.wake_up()
            assert run(llm) == before

    def test_a_version_is_received_while_steps_go_on_and_is_whole_at_the_commit(self, engine, tmp_path):
        llm = engine(deterministic=True)
        before = run(llm)
        updater = llm.frontend.client.driver.executor.updater
        weights = {name: view.cpu() for name, view in updater.live("test").items()}
        for version, factor in ((1, 0.5), (2, 1.0)):
            values = {k: v * factor if "norm" in k else v for k, v in weights.items()}
            manifest = sync.publish(tmp_path / "store", values, version)
            updater.begin(manifest)
            receiving = threading.Thread(target=updater.receive, args=(StoreReceiver(tmp_path / "store"),))
            receiving.start()
            during = run(llm)
            receiving.join()
            updater.verify()
            updater.commit()
            assert updater.confirm() == manifest.digest
            llm.reset_prefix_cache()
            assert (during == before) == (version == 1)
        assert run(llm) == before

    def test_weights_come_from_another_process_of_the_device(self, engine, checkpoint, tmp_path):
        llm = engine(deterministic=True)
        before, directory = run(llm), str(tmp_path / "meeting")
        command = [sys.executable, "-c", TRAINER, checkpoint, directory]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
            for version in (1, 2):
                manifest = msgspec.json.decode(trainer.stdout.readline(), type=WeightManifest)
                assert manifest.version == version
                assert llm.collective_rpc("begin_weight_update", args=(manifest,)) == [True]
                llm.collective_rpc("receive_weights", args=("ipc", {"directory": directory}))
                llm.collective_rpc("verify_weights")
                assert llm.collective_rpc("commit_weight_update", args=(version,)) == [manifest.digest]
                llm.reset_prefix_cache()
                assert (run(llm) == before) == (version == 2)
        assert trainer.returncode == 0

    def test_a_trainer_pushes_to_a_core_on_its_device(self, checkpoint):
        """With its weights where they are, and cast: those have to be packed."""
        weights = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to("cuda").state_dict()
        halved = {name: value * 0.5 if "norm" in name else value for name, value in weights.items()}

        async def tokens(engine):
            return [output.outputs[0].token_ids async for output in engine.generate(PROMPTS[0], DRAWN)][-1]

        async def push_three(engine):
            before = await tokens(engine)
            for version, source in enumerate((halved, weights, {k: v.float() for k, v in halved.items()}), start=1):
                report = await engine.update_weights(source, transport="ipc", kv="recompute")
                assert (report.version, engine.policy_version) == (version, version)
                assert await engine.collective_rpc("get_weight_digest") == [report.digest]
                await engine.reset_prefix_cache()
                assert (await tokens(engine) == before) == (version == 2)

        with AsyncLLM(checkpoint, **(OPTIONS | {"deterministic": True})) as engine:
            asyncio.run(push_three(engine))

    def test_graphs_follow_new_weights(self, engine):
        llm = engine(deterministic=True)
        before = run(llm)
        weights = {k: v.clone() for k, v in llm.llm_engine.apply_model(lambda m: m.state_dict())[0].items()}
        llm.update_weights({k: v * 0.5 if "norm" in k else v for k, v in weights.items()})
        assert run(llm) != before
        llm.update_weights(weights)
        assert run(llm) == before

    def test_the_pool_is_what_the_largest_step_leaves(self, engine):
        llm = engine(num_kv_blocks=None, gpu_memory_utilization=0.3, max_num_seqs=256, max_num_batched_tokens=4096)
        assert len(run(llm)) == len(PROMPTS)
        free, total = torch.cuda.mem_get_info()
        assert total - free < 0.4 * total


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_have_the_bits_of_one(checkpoint, mixture, engine):
    assert run(engine(mixture, deterministic=True, tensor_parallel_size=2)) == run(engine(mixture, deterministic=True))
    one, two = (engine(deterministic=True, tensor_parallel_size=n) for n in (1, 2))
    assert_fused_and_captured(two.frontend.client.info.choices)
    assert run(two) == run(one)
    source = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        source.model.norm.weight *= 0.5
    assert two.update_weights(source).digest == one.update_weights(source).digest
    assert run(two) == run(one)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("kind", "dtype", "atol"), [("dense", "bfloat16", 0.05), ("mixture", "float32", 1e-3)])
def test_two_devices_that_split_sums_score_as_one_but_for_rounding(checkpoint, mixture, engine, kind, dtype, atol):
    """In bfloat16 rounding moves a mixture's tokens to other experts."""
    path = mixture if kind == "mixture" else checkpoint
    one, two = (engine(path, dtype=dtype, deterministic="auto", tensor_parallel_size=n) for n in (1, 2))
    assert_fused_and_captured(two.frontend.client.info.choices)
    source = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    with torch.no_grad():
        source.model.layers[0].self_attn.o_proj.weight *= 0.5
    assert two.update_weights(source).digest == one.update_weights(source).digest
    said = run(two)  # by graphs; scores are computed without
    tokens, logprobs = [list(tokens) for tokens, _ in said], np.concatenate([each for _, each in said])
    for llm in (two, one):
        scores = llm.score(PROMPTS, tokens, temperature=DRAWN.temperature)
        np.testing.assert_allclose(np.concatenate(scores), logprobs, atol=atol)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")
def test_a_checkpoint_that_stores_tied_weights_twice_is_loaded(tmp_path, engine):
    path = tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    assert len(run(engine(str(path)))) == len(PROMPTS)
