"""verl's own generation, replicas and weight updates on this engine, without a GPU.

The server runs in this engine's own environment: $ROLLOUT_ENGINE_PYTHON, by default the one of TRL's tests beside this.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
import pandas
import ray
import torch
from omegaconf import OmegaConf
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from envs_adapters.trainers.verl_server import ServerSettings

OURS = os.environ.get("ROLLOUT_ENGINE_PYTHON") or str(Path(sys.prefix).parent / "trl" / "bin" / "python")
MAKE = "import sys; from rollout_engine.testing import tiny_checkpoint; tiny_checkpoint(sys.argv[1], 'llama')"
PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0.0, "logprobs": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verl") / "tiny"
    subprocess.run([OURS, "-c", MAKE, directory], check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def settings(checkpoint, **changes):
    """(rollout, model) settings as verl's trainer has them."""
    rollout = {
        "_target_": "verl.workers.config.RolloutConfig",
        "name": "rollout_engine",
        "tensor_model_parallel_size": 1,
        "prompt_length": 32,
        "response_length": 16,
        "max_model_len": 64,
        "max_num_seqs": 16,
        "dtype": "float32",
        "load_format": "auto",
        "engine_kwargs": {"rollout_engine": {"python": OURS, "options": {"log_stats": False}}},
    }
    model = {"_target_": "verl.workers.config.HFModelConfig", "path": str(checkpoint)}
    return OmegaConf.create(rollout | changes), OmegaConf.create(model)


def make_replica(checkpoint, rank=0, **changes):
    rollout, model = settings(checkpoint, **changes)
    return get_rollout_replica_class("rollout_engine")(rank, rollout, model, gpus_per_node=1)


@pytest.fixture(scope="module")
def replica(cluster, checkpoint):
    made = make_replica(checkpoint)
    asyncio.run(made.init_standalone())
    yield made
    ray.get(made.server_handle.close.remote())


@pytest.fixture
def rollout(replica, checkpoint, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    return get_rollout_class("rollout_engine")(*settings(checkpoint), device_mesh=None)


def generate(replica, **settings):
    ask = replica.server_handle.generate.remote
    return ray.get(ask(prompt_ids=PROMPT, sampling_params=GREEDY | settings, request_id="one"))


def by_transformers(model, num_tokens):
    """(tokens, log-probs) of the greedy answer."""
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    tokens = ids[0, len(PROMPT) :]
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def load(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def test_a_round_of_verls_own_generation_server(checkpoint, tmp_path):
    prompts = [[{"role": "user", "content": text}] for text in ("hello", "2+2")]
    pandas.DataFrame({"prompt": prompts}).to_parquet(tmp_path / "in.parquet")
    rollout = {
        "name": "rollout_engine",
        "tensor_model_parallel_size": 1,
        "load_format": "auto",
        "dtype": "float32",
        "prompt_length": 64,
        "response_length": 16,
        "n": 2,
    }
    options = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    options += [f"actor_rollout_ref.model.path={checkpoint}", "trainer.n_gpus_per_node=1", "trainer.nnodes=1"]
    options += [f"data.train_files={tmp_path}/in.parquet", "data.prompt_key=prompt"]
    options += [f"+data.output_path={tmp_path}/out.parquet", f"hydra.run.dir={tmp_path}"]
    environment = os.environ | {"ROLLOUT_ENGINE_PYTHON": OURS, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "verl.trainer.main_generation_server", *options]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    answers = pandas.read_parquet(tmp_path / "out.parquet")["responses"].tolist()
    assert [len(each) for each in answers] == [2, 2]
    assert all(text for each in answers for text in each)


def test_tokens_and_log_probs_are_the_models(replica, checkpoint):
    answer = generate(replica, max_tokens=8, ignore_eos=True)
    tokens, logprobs = by_transformers(load(checkpoint), 8)
    assert answer.token_ids == tokens
    assert answer.log_probs == pytest.approx(logprobs, abs=1e-5)
    assert answer.stop_reason == "completed"
    assert answer.extra_fields["max_global_steps"] == answer.extra_fields["min_global_steps"] == 0


def test_experts_come_where_verl_replays_them(cluster, tmp_path):
    make = "import sys; from rollout_engine.testing import tiny_checkpoint; tiny_checkpoint(sys.argv[1], 'qwen3_moe')"
    subprocess.run([OURS, "-c", make, tmp_path / "tiny"], check=True, capture_output=True)
    mixture = make_replica(tmp_path / "tiny", rank=2, enable_rollout_routing_replay=True)
    asyncio.run(mixture.init_standalone())
    experts = generate(mixture, max_tokens=8, ignore_eos=True).routed_experts
    ray.get(mixture.server_handle.close.remote())
    config = AutoConfig.from_pretrained(tmp_path / "tiny")
    assert experts.shape == (len(PROMPT) + 8 - 1, config.num_hidden_layers, config.num_experts_per_tok)
    assert experts.dtype == "int16" and 0 <= experts.min() and experts.max() < config.num_experts


def test_without_a_limit_the_answer_is_as_long_as_verl_allows(replica):
    assert len(generate(replica, ignore_eos=True).token_ids) == 16
    assert generate(replica, logprobs=False, max_tokens=2).log_probs is None


def test_weights_come_in_pieces_and_every_token_says_its_step(replica, rollout, checkpoint):
    model = load(checkpoint)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    asyncio.run(rollout.update_weights(iter(model.state_dict().items()), global_steps=7))
    answer = generate(replica, max_tokens=8, ignore_eos=True)
    tokens, logprobs = by_transformers(model, 8)
    assert answer.token_ids == tokens
    assert answer.log_probs == pytest.approx(logprobs, abs=1e-5)
    assert answer.extra_fields["global_steps"] == answer.extra_fields["min_global_steps"] == 7


def test_an_update_that_is_incomplete_is_refused_and_the_old_weights_serve(replica, rollout, checkpoint):
    before = generate(replica, max_tokens=4, ignore_eos=True).token_ids
    names = list(load(checkpoint).state_dict().items())[:-2]
    with pytest.raises(RuntimeError, match="/end_weight_update"):
        asyncio.run(rollout.update_weights(iter(names), global_steps=8))
    assert generate(replica, max_tokens=4, ignore_eos=True).token_ids == before


def test_aborted_requests_bring_their_tokens_and_later_ones_wait_or_come_back(replica):
    ask = replica.server_handle.generate.remote
    long = ask(prompt_ids=PROMPT, sampling_params={"max_tokens": 60, "ignore_eos": True}, request_id="long")
    asyncio.run(replica.abort_all_requests())
    late = ask(prompt_ids=PROMPT, sampling_params=GREEDY | {"max_tokens": 2}, request_id="late")
    assert ray.get(long).stop_reason in ("aborted", "completed")
    assert ray.wait([late], timeout=0.5)[0] == []
    asyncio.run(replica.resume_generation())
    assert ray.get(late).stop_reason == "completed"
    asyncio.run(replica.abort_all_requests(reject_request=True))
    assert generate(replica, max_tokens=2).stop_reason == "aborted"
    asyncio.run(replica.resume_generation())
    assert generate(replica, max_tokens=2).stop_reason == "completed"


def test_memory_is_released_and_taken_back(replica, rollout, checkpoint):
    before = generate(replica, max_tokens=4).token_ids
    model = load(checkpoint)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)

    async def cycle():
        await rollout.release()
        await rollout.resume(["weights"])
        await rollout.update_weights(iter(model.state_dict().items()), global_steps=9)
        await rollout.resume(["kv_cache"])

    asyncio.run(cycle())
    asyncio.run(replica.release_kv_cache())
    asyncio.run(replica.resume_kv_cache())
    asyncio.run(replica.clear_kv_cache())
    assert generate(replica, max_tokens=4).token_ids == before


def test_what_cannot_be_served_is_refused_with_what_to_do(replica, rollout, checkpoint):
    ask = replica.server_handle.generate.remote
    for match, given in {
        "images of PIL": {"image_data": ["picture"]},
        "video_data and audio_data must be empty": {"video_data": ["film"]},
        "takes no pictures": {"image_data": [Image.new("RGB", (8, 8))]},  # its model has no tower
    }.items():
        with pytest.raises(ray.exceptions.RayTaskError, match=match):
            ray.get(ask(prompt_ids=PROMPT, sampling_params={}, request_id="x", **given))
    with pytest.raises(ray.exceptions.RayTaskError, match="no_such_setting"):
        generate(replica, no_such_setting=1)
    with pytest.raises(ValueError, match="wire_format='delta_flush'"):
        asyncio.run(rollout.update_weights(iter([]), wire_format="delta_flush"))
    with pytest.raises(ValueError, match="lora.merge=True"):
        asyncio.run(rollout.update_weights(iter([]), peft_config={"r": 8}, base_sync_done=True))
    wide = get_rollout_replica_class("rollout_engine")(
        0, *settings(checkpoint, tensor_model_parallel_size=2), gpus_per_node=2
    )
    with pytest.raises(ValueError, match="has one rank, not 2"):
        asyncio.run(wide.init_standalone())


def test_a_server_that_cannot_start_says_why(cluster, checkpoint):
    changes = {"engine_kwargs": {"rollout_engine": {"python": OURS, "options": {"max_nun_seqs": 1}}}}
    broken = make_replica(checkpoint, rank=1, **changes)
    with pytest.raises(ray.exceptions.RayTaskError, match="Did you mean 'max_num_seqs'"):
        asyncio.run(broken.init_standalone())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"python": "p", "dtype": "float32"}, "has dtype; known are address, python, options"),
        ({}, "names no server"),
    ],
)
def test_settings_say_what_is_missing(given, message, monkeypatch):
    monkeypatch.delenv("ROLLOUT_ENGINE_PYTHON", raising=False)
    with pytest.raises(ValueError, match=message):
        ServerSettings(given)


def test_replicas_find_servers_that_run_already():
    found = ServerSettings({"address": ["a:1", "b:2"]})
    assert [found.address_of(0), found.address_of(1)] == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="none for replica 2"):
        found.address_of(2)


def test_the_model_is_one_that_both_environments_know(checkpoint):
    assert AutoConfig.from_pretrained(checkpoint).model_type == "llama"
