"""Weight transfers for TRL's AsyncGRPOTrainer, called by TRL's own code."""

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

import torch  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer  # noqa: E402

from envs_adapters.trainers.trl import PolicyWeightTransfer, StoreWeightTransfer  # noqa: E402
from rollout_engine import RolloutPolicy, SamplingParams  # noqa: E402
from rollout_engine.base.errors import ManifestMismatchError, WeightUpdateError  # noqa: E402
from rollout_engine.testing import tiny_checkpoint, tiny_model  # noqa: E402
from sync import SyncError  # noqa: E402


@pytest.fixture
def policy(tmp_path):
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path / "model"), dtype="float32") as policy:
        yield policy


class Trainer(AsyncGRPOTrainer):
    """The part of TRL's trainer that syncs weights: its own methods, without the device that the rest of it needs."""

    def __init__(self, model, weight_transfer):
        self.accelerator = async_grpo_trainer.Accelerator(cpu=True)
        self.model, self.weight_transfer = model, weight_transfer
        self._lora_sync, self.model_version, self.rollout_worker = False, 0, None
        self._metrics = {"train": {f"perf/weight_sync{part}_s": [] for part in ("", "_pause", "_barrier", "_transfer")}}


def answers(policy):
    batch = policy.rollout(["one", "two"], SamplingParams(max_tokens=8, seed=1), use_tqdm=False)
    return batch["tokens", "response"].tolist(), batch["log_probs", "response"].tolist()


@pytest.mark.parametrize("kind", [PolicyWeightTransfer, StoreWeightTransfer])
def test_it_has_every_method_that_trl_calls(kind):
    protocol = async_grpo_trainer.WeightTransferProtocol
    methods = [name for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"]
    assert set(methods) == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    for name in methods:
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(
            inspect.signature(getattr(protocol, name)).parameters
        )


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("to", ["policy", "store"])
def test_trl_syncs_its_weights_and_versions_agree(to, is_tied, tmp_path):
    path = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=is_tied)
    with RolloutPolicy.from_pretrained(path, dtype="float32") as policy:
        if to == "policy":
            transfer = PolicyWeightTransfer(policy)
        else:
            transfer = StoreWeightTransfer(tmp_path / "store", lambda where, version: policy.update_weights(where))
        trainer = Trainer(tiny_model(seed=7, tie_word_embeddings=is_tied), transfer)
        async_grpo_trainer._TrainBeginCallback(trainer).on_train_begin(None, None, None)
        assert (trainer.model_version, policy.policy_version) == (1, 1)
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight.add_(0.05)
        trainer._sync_weight()
        assert (trainer.model_version, policy.policy_version) == (2, 2)
        got = answers(policy)
        policy.update_weights(trainer.model)
        assert answers(policy) == got
        transfer.destroy()


@pytest.mark.parametrize("to", ["policy", "store"])
def test_a_transfer_that_fails_leaves_the_old_weights_serving(to, policy, tmp_path):
    announced = []
    if to == "policy":
        transfer = PolicyWeightTransfer(policy)
    else:
        transfer = StoreWeightTransfer(
            tmp_path / "store", lambda where, version: announced.append(policy.update_weights(where).version)
        )
    trainer = Trainer(tiny_model(seed=7), transfer)
    before = answers(policy)

    def breaks():
        yield from list(trainer.model.named_parameters())[:5]
        raise ConnectionError("the trainer's node is gone")

    transfer.pause()
    with pytest.raises(ConnectionError, match="node is gone"):
        transfer.send_weights(breaks())
    assert answers(policy) == before and policy.policy_version == 0 and not announced
    trainer.model.get_input_embeddings().weight.data[3, 4] = torch.nan
    with pytest.raises((WeightUpdateError, SyncError), match="embed_tokens"):
        trainer._sync_weight()
    assert answers(policy) == before and (trainer.model_version, policy.policy_version) == (0, 0)
    trainer.model.get_input_embeddings().weight.data[3, 4] = 0
    trainer._sync_weight()
    assert answers(policy) != before and trainer.model_version == 1


def test_frozen_parameters_which_trl_does_not_send_are_kept_on_request(policy):
    trainer = Trainer(tiny_model(seed=7), PolicyWeightTransfer(policy))
    trainer.model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(ManifestMismatchError, match="embed_tokens"):
        trainer._sync_weight()
    trainer.weight_transfer = PolicyWeightTransfer(policy, partial=True)
    trainer._sync_weight()
    assert policy.policy_version == 1


def test_requests_in_flight_go_on_over_a_transfer(policy):
    transfer = PolicyWeightTransfer(policy)
    trainer = SimpleNamespace(model=tiny_model(seed=7))
    seen = []

    def reward(completions):
        if not seen:
            transfer.pause()
            transfer.send_weights(iter(trainer.model.named_parameters()))
            transfer.resume()
        seen.extend(completions)
        return [0.0] * len(completions)

    short, long = SamplingParams(max_tokens=1, seed=1), SamplingParams(max_tokens=40, seed=2, ignore_eos=True)
    batch = policy.rollout(["one", "two"], [short, long], reward_fn=reward, use_tqdm=False)
    versions = batch["policy_version"][1]
    assert versions[versions >= 0].unique().tolist() == [0, 1] and len(seen) == 2
