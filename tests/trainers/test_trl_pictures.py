"""TRL's real GRPOTrainer with images in its prompts, generating by our engine."""

import pytest

pytest.importorskip("trl")

import torch  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from envs_adapters.trainers.trl import ExactLogprobs, attach, make_rollout_func  # noqa: E402
from rollout_engine import RolloutPolicy, exact  # noqa: E402
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint  # noqa: E402
from rollout_engine.text.picture_processor import _make_processor  # noqa: E402
from rollout_engine.text.tokenizer import TextCodec  # noqa: E402
from tests.trainers.recorder import Recorder  # noqa: E402
from tests.trainers.trl_runs import grpo_trainer, logged, message_length_reward  # noqa: E402

# TRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
DIFFERENCE = "sampling/sampling_logp_difference/max"
ROWS = [
    {"prompt": [{"role": "user", "content": f"Which, {seed}?"}], "image": random_picture(seed, 40, 24 + 8 * (seed % 2))}
    for seed in range(4)
]


class ExactGRPOTrainer(ExactLogprobs, GRPOTrainer):
    """As the documentation makes it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, dtype="float32") as policy:
        yield Recorder(policy)


def trainer_of(checkpoint, out, **options):
    """A trainer of the composite, tower included."""
    hf = TextCodec.from_pretrained(str(checkpoint)).hf
    processor = _make_processor(checkpoint, hf)  # transformers' own, which asks for torchvision if it reads videos too
    processor.chat_template, processor.tokenizer.padding_side = hf.chat_template, "left"
    model = exact.enable(AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32))
    given = {"kind": ExactGRPOTrainer, "reward": message_length_reward, "rows": ROWS, "processing_class": processor}
    return grpo_trainer(checkpoint, out, model=model, **given, **options)


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_the_log_probs_of_a_trainer_with_images_are_the_engines(checkpoint, policy, tmp_path, micro_batch):
    steps = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 8 // micro_batch}
    trainer = trainer_of(checkpoint, tmp_path, **steps)
    tower = [each.clone() for name, each in trainer.model.named_parameters() if "visual" in name]
    attach(trainer, policy)
    trainer.train()
    assert logged(trainer, DIFFERENCE) == [0.0, 0.0]
    assert [params.n for run in policy.rollouts for params in run.params] == [4, 4] * 2
    assert all(len(shown) == 1 for run in policy.rollouts for shown in run.batch["pictures"])
    after = [each for name, each in trainer.model.named_parameters() if "visual" in name]
    assert any(not torch.equal(old, new) for old, new in zip(tower, after, strict=True))


def test_a_rollout_func_takes_the_images_of_conversations(checkpoint, policy, tmp_path):
    trainer = trainer_of(checkpoint, tmp_path, rollout_func=make_rollout_func(policy), max_steps=1)
    trainer.train()
    [run] = policy.rollouts
    assert [params.n for params in run.params] == [4, 4]
    pictures = [shown[0].picture for shown in run.batch["pictures"]]
    assert len({each.digest for each in pictures}) == 2
    assert logged(trainer, DIFFERENCE) == [0.0]
