"""Tinker's training half: an adapter that is trained as the exact trainer does, and sampled from at once."""

import numpy as np
import pytest
import torch

from rollout_engine import RolloutPolicy, exact
from rollout_engine.rollouts.tinker import lora_trainer
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from tests.unit.peft_layers import PeftModel

from .conftest import Client
from .tinker_client import TinkerClient

IDS = [[5, 6, 7, 8, 9, 10], [20, 21, 22]]
TARGETS = [[6, 7, 8, 9, 10, 11], [21, 22, 0]]
WEIGHTS = [[0.0, 0.0, 1.0, 1.0, 0.5, 0.0], [1.0, 2.0, 0.0]]
SUPERVISED = [(i, {"target_tokens": t, "weights": w}) for i, t, w in zip(IDS, TARGETS, WEIGHTS, strict=True)]


@pytest.fixture(scope="module")
def own_policy(checkpoint):
    """Its adapters are other tests' of this file alone."""
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=256, seed=3, max_loras=2) as made:
        yield made


@pytest.fixture(scope="module")
def app(own_policy, tmp_path_factory):
    options = ServeOptions(served_model_name="tiny", tinker=str(tmp_path_factory.mktemp("saved")))
    made = App(own_policy, options, lora_trainer(own_policy))
    yield made
    made.served.tinker.close()


@pytest.fixture
def tinker(app):
    made = TinkerClient(Client(app))
    yield made
    app.served.tinker.end(made.session)


def snapshot(tinker, model, seq_id):
    """A sampler of the adapter as it is now."""
    tinker.num_samplers += 1
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": tinker.num_samplers}
    return tinker.result(tinker.post("save_weights_for_sampler", body))["sampling_session_id"]


def rl_example(prompt, tokens, logprobs, advantage):
    """A sample as Tinker's cookbook trains on it."""
    zeros = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": [0] * (len(prompt) - 1) + tokens,
        "logprobs": zeros + [float(each) for each in logprobs],
        "advantages": zeros + [advantage] * len(tokens),
    }
    return prompt + tokens[:-1], inputs


def test_a_pass_is_that_of_the_exact_trainer(app, checkpoint, tinker):
    model = tinker.model(train_mlp=False)
    logprobs, loss = tinker.run(model, 1, SUPERVISED)
    trainer = app.served.tinker.trainer
    ours = {key: each.grad.clone() for key, each in trainer._adapters[model].parameters.items()}
    twin = PeftModel(exact.load(checkpoint, "float32"), ("q_proj", "k_proj", "v_proj", "o_proj"), rank=4, alpha=32)
    values = {key: each.detach() for key, each in trainer._adapters[model].parameters.items()}
    state = {
        key.replace("base_model.model.", "base_model.model.", 1).replace(".weight", ".default.weight"): v
        for key, v in values.items()
    }
    assert not twin.load_state_dict(state, strict=False).unexpected_keys
    exact.enable(twin)
    expected_loss = 0.0
    for ids, targets, weights, found in zip(IDS, TARGETS, WEIGHTS, logprobs, strict=True):
        logits = twin(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        values = exact.logprobs_of(logits, torch.tensor(targets))
        assert values.detach().numpy().tobytes() == found.tobytes()
        part = -(torch.tensor(weights) * values).sum()
        part.backward()
        expected_loss += part.item()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    theirs = {key.replace(".default", ""): p.grad for key, p in twin.named_parameters() if p.grad is not None}
    assert theirs.keys() == {key for key in ours}
    for key, grad in ours.items():
        torch.testing.assert_close(grad, theirs[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_log_probs_in_training_are_the_samplers_after_every_step(tinker, loss):
    model, seq_id = tinker.model(), 0
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    for step in range(3):
        sampler = snapshot(tinker, model, seq_id := seq_id + 1)
        examples, sampled = [], []
        for prompt in prompts:
            for i, (tokens, logprobs) in enumerate(tinker.sample(sampler, prompt, 2, params={"seed": step})[0]):
                examples.append(rl_example(prompt, tokens, logprobs, 1.0 - 2 * i))
                sampled.append(logprobs)
        found, value = tinker.run(model, seq_id := seq_id + 1, examples, loss)
        assert [each[-len(s) :].tobytes() for each, s in zip(found, sampled, strict=True)] == [
            s.tobytes() for s in sampled
        ]
        assert value == -sum(sum(inputs["advantages"]) for _, inputs in examples)  # every ratio is 1
        assert tinker.step(model, seq_id := seq_id + 1)["metrics"]["unclipped_grad_l2:mean"] > 0


def test_snapshots_stay_what_they_were_and_inflight_samplers_follow(tinker):
    model = tinker.model()
    before = snapshot(tinker, model, 1)
    body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 900, "kind": "inflight"}
    inflight = tinker.result(tinker.post("save_weights_for_sampler", body))["sampling_session_id"]
    first, follows = (tinker.sample(each, IDS[0])[0] for each in (before, inflight))
    tinker.run(model, 3, SUPERVISED)
    tinker.step(model, 4, learning_rate=0.3)
    after = snapshot(tinker, model, 5)
    body = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 901, "kind": "inflight"}
    tinker.result(tinker.post("save_weights_for_sampler", body))

    def same(a, b):
        return [(ids, logprobs.tobytes()) for ids, logprobs in a] == [(ids, logprobs.tobytes()) for ids, logprobs in b]

    assert same(first, follows) and same(first, tinker.sample(before, IDS[0])[0])
    assert same(tinker.sample(after, IDS[0])[0], tinker.sample(inflight, IDS[0])[0])
    assert not same(first, tinker.sample(after, IDS[0])[0])


def test_a_saved_adapter_continues_to_the_same_bits(tinker, app):
    model = tinker.model()
    tinker.run(model, 1, SUPERVISED)
    tinker.step(model, 2)
    saved = tinker.result(tinker.post("save_weights", {"model_id": model, "seq_id": 3, "path": "here"}))["path"]
    assert saved == f"tinker://{model}/weights/here"
    taken = tinker.result(tinker.post("save_weights", {"model_id": model, "seq_id": 4, "path": "here"}))
    assert taken["category"] == "user" and "overwrite=True" in taken["error"]
    tinker.run(model, 5, SUPERVISED)
    tinker.step(model, 6)
    expected, _ = tinker.run(model, 7, SUPERVISED, forward_only=True)
    other = TinkerClient(tinker.client)
    body = {"session_id": other.session, "model_seq_id": 0, "path": saved, "optimizer": True}
    again = other.result(other.post("load_weights", body))["model_id"]
    other.run(again, 1, SUPERVISED)
    other.step(again, 2)
    found, _ = other.run(again, 3, SUPERVISED, forward_only=True)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    tinker.result(tinker.post("load_weights", {"model_id": model, "seq_id": 8, "path": saved, "optimizer": False}))
    loaded, _ = tinker.run(model, 9, SUPERVISED, forward_only=True)
    assert [each.tobytes() for each in loaded] != [each.tobytes() for each in expected]
    info = tinker.post("weights_info", {"tinker_path": saved})
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("tiny", 4, False)
    runs = f"/api/v1/training_runs/{model}"
    [listed] = tinker.client.send("GET", f"{runs}/checkpoints").json()["checkpoints"]
    assert listed["tinker_path"] == saved and tinker.client.send("GET", runs).json()["lora_rank"] == 4
    assert tinker.client.send("DELETE", f"{runs}/checkpoints/weights/here").status_code == 200
    assert tinker.client.send("GET", runs).status_code == 404
    app.served.tinker.end(other.session)


def test_a_step_behind_a_pass_that_failed_is_refused(tinker):
    model = tinker.model()
    tinker.run(model, 1, SUPERVISED)
    wrong = [([5, 6], {"target_tokens": [6, 999_999], "weights": [1.0, 1.0]})]
    assert "999999" in tinker.run(model, 2, wrong)["error"]
    assert "has failed" in tinker.step(model, 3)["error"]
    assert "no gradients" in tinker.step(model, 4)["error"]
    tinker.run(model, 5, SUPERVISED)
    assert tinker.send_pass(model, 6, [([], {})]).status_code == 400
    assert "has failed" in tinker.step(model, 7)["error"]
    tinker.run(model, 8, SUPERVISED)
    assert tinker.step(model, 9)["metrics"]


def test_what_is_not_trained_is_refused(tinker):
    refused = tinker.post(
        "create_model",
        {"session_id": tinker.session, "model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 999}},
        400,
    )
    assert "max_lora_rank" in refused["error"]["message"]
    model = tinker.model()
    body = {"session_id": tinker.session, "model_seq_id": 1, "base_model": "tiny"}
    assert "trains one adapter" in tinker.post("create_model", body, 400)["error"]["message"]
    response = tinker.send_pass(model, 1, SUPERVISED, "stable_reinforce")
    assert response.status_code == 400 and "'ppo'" in response.json()["error"]["message"]
    assert "weights" in tinker.run(model, 1, SUPERVISED, "importance_sampling")["error"]
    assert "no settings" in tinker.run(model, 2, SUPERVISED, config={"x": 1.0})["error"]
    dimuon = {"model_id": model, "seq_id": 3, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    assert "optimizer_params" in tinker.post("optim_step", dimuon, 400)["error"]["message"]
    assert tinker.send_pass(model, 1, SUPERVISED).json()["request_id"].endswith(":1")  # sent again: the same request
    tinker.result(tinker.post("unload_model", {"model_id": model}))
    tinker.post("get_info", {"model_id": model}, 404)
    assert tinker.model(train_attn=False)


def test_old_snapshots_give_way_and_say_so(tinker, monkeypatch):
    monkeypatch.setattr("rollout_engine.serve.tinker.training.KEPT_SNAPSHOTS", 2)
    model = tinker.model()
    first, *_, last = (snapshot(tinker, model, seq_id) for seq_id in range(1, 4))
    assert "have given way" in tinker.ask(first, IDS[0], status=400)["error"]["message"]
    assert np.isfinite(tinker.sample(last, IDS[0])[0][0][1]).all()
