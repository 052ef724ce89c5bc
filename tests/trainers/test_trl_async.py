"""TRL's real AsyncGRPOTrainer and rollout worker: completions by our HTTP server, weights by our transfers.

Three things of TRL's that want a CUDA device or vLLM, and touch neither completions nor weights, are replaced.
"""

from types import SimpleNamespace

import pytest

for package in ("trl", "aiohttp", "requests", "uvicorn"):
    pytest.importorskip(package)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402

from envs_adapters.trainers.trl import PolicyWeightTransfer, StoreWeightTransfer  # noqa: E402
from rollout_engine import RolloutPolicy  # noqa: E402
from rollout_engine.serve.options import ServeOptions  # noqa: E402
from rollout_engine.serve.server import HttpServer  # noqa: E402
from rollout_engine.testing import tiny_checkpoint  # noqa: E402
from tests.trainers.trl_runs import PROMPTS, logged, message_length_reward  # noqa: E402

# TRL's own use of what it depends on.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]
MODULES = "trl.experimental.async_grpo"
STEPS = 3


@pytest.fixture(autouse=True)
def without_devices(monkeypatch):
    """FlashAttention 3, the name of a CUDA device, and whether vLLM is installed, which the worker only asks."""
    attention = SimpleNamespace(flash_attn_varlen_func=segments_attention)
    monkeypatch.setattr(f"{MODULES}.packing._flash_attn", lambda: attention)
    monkeypatch.setattr(f"{MODULES}.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(f"{MODULES}.async_rollout_worker.is_vllm_available", lambda *_: True)


def segments_attention(query, key, value, starts, key_starts, *_, softmax_scale, **__):
    """FlashAttention's varlen function [tokens, heads, size]: each segment sees its keys, the last ones causally."""
    outputs = []
    for first, end, key_first, key_end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        parts = query[first:end], key[key_first:key_end], value[key_first:key_end]
        mask = torch.ones(end - first, key_end - key_first, dtype=torch.bool).tril(key_end - key_first - end + first)
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("to", ["policy", "store"])
def test_trls_own_worker_samples_from_our_server_while_weights_change(to, tmp_path):
    path = str(tiny_checkpoint(tmp_path / "model"))
    with RolloutPolicy.from_pretrained(path, dtype="float32") as policy:
        transfer = PolicyWeightTransfer(policy)
        if to == "store":
            transfer = StoreWeightTransfer(tmp_path / "store", lambda where, version: policy.update_weights(where))
        with HttpServer(policy, ServeOptions(port=0)) as server:
            trainer = async_trainer(path, tmp_path, server.url, transfer)
            trainer.train()
        assert trainer.model_version == policy.policy_version == STEPS + 1
        assert len(logged(trainer, "reward")) == STEPS
        fresh = [row for row in trainer.state.log_history if row.get("sample/staleness_max") == 0]
        assert all(row["ratio"] == pytest.approx(1, abs=1e-4) for row in fresh) and fresh


def async_trainer(path, out, url, transfer):
    tokenizer = AutoTokenizer.from_pretrained(path)
    content = {"close": "<eos>", "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"content": content},
    }
    args = AsyncGRPOConfig(
        output_dir=str(out),
        vllm_server_base_url=url,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_inflight_tasks=8,
        token_budget=512,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dtype="float32",
    )
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return AsyncGRPOTrainer(
        model=path,
        reward_funcs=message_length_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        weight_transfer=transfer,
    )
