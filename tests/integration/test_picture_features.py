"""The engine's own features of pictures for a trainer with a frozen tower, in process and in a process of its own."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rollout_engine import (
    LLM,
    AsyncLLM,
    ConfigError,
    LifecycleError,
    RequestError,
    RolloutPolicy,
    SamplingParams,
    exact,
    to_trl,
)
from rollout_engine.testing import random_picture, tiny_checkpoint, tiny_vision_checkpoint

PARAMS = SamplingParams(max_tokens=6, seed=3)


def asked(*seeds):
    parts = [{"type": "image", "image": random_picture(seed, 40, 24 + 8 * (seed % 2))} for seed in seeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]


PROMPTS = [asked(1), asked(2, 1), [{"role": "user", "content": "No picture."}]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture
def trainer(checkpoint):
    model = exact.enable(AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32))
    model.model.visual.requires_grad_(False)
    return model


def differing(trainer, batch, **inputs):
    """Sampled tokens whose log-probs differ between engine and trainer."""
    packed = {"cu_seqlens": batch["cu_seqlens"]} if "cu_seqlens" in batch.keys() else {}
    mask = None if packed else batch["masks", "all_attention_mask"]
    ours = exact.token_logprobs(trainer, batch["tokens", "full"], mask, **packed, **inputs)
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    return int((ours != batch["log_probs", "full"][:, 1:])[sampled].sum())


@pytest.mark.parametrize(
    "kind", ["here", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("process", "ranks"))]
)
def test_features_are_fetched_once_encoded_and_are_those_of_the_live_tower(checkpoint, trainer, kind):
    options = dict(dtype="float32", log_stats=False, tensor_parallel_size=2 if kind == "ranks" else 1)
    face = AsyncLLM if kind == "process" else LLM
    with RolloutPolicy(face(str(checkpoint), **options)) as policy:
        batch = policy.rollout(PROMPTS, PARAMS, num_samples=2, use_tqdm=False)
        assert policy.add_picture_features(batch) is batch
        assert [len(row) for row in batch["picture_features"]] == [1, 1, 2, 2, 0, 0]
        assert policy.get_metrics().core.counters.pictures.num_encoded == 2, "they were kept"
        assert differing(trainer, batch, **exact.inputs(batch, features=True)) == 0
        policy.reset_encoder_cache()
        packed = policy.rollout(PROMPTS[2:], PARAMS, layout="packed", use_tqdm=False)
        assert "picture_features" not in policy.add_picture_features(packed).keys()
        packed = policy.add_picture_features(policy.rollout(PROMPTS, PARAMS, layout="packed", use_tqdm=False))
        assert policy.get_metrics().core.counters.pictures.num_encoded == 2, "by steps; these knew the KV"
        assert differing(trainer, packed, **exact.inputs(packed, features=True)) == 0
        with torch.no_grad():
            list(trainer.model.visual.parameters())[-1].add_(0.5)
        with pytest.raises(ConfigError, match="of another vision tower"):
            differing(trainer, batch, **exact.inputs(batch, features=True))
        policy.update_weights(trainer)
        again = policy.add_picture_features(policy.rollout(PROMPTS, PARAMS, use_tqdm=False))
        assert differing(trainer, again, **exact.inputs(again, features=True)) == 0
        policy.sleep()
        with pytest.raises(LifecycleError, match="get_picture_features: .*wake_up"):
            policy.add_picture_features(again)
        policy.wake_up()


def test_a_weight_outside_of_the_parts_is_one_of_the_tower(tmp_path):
    """LLaVA-NeXT ends lines of features with a parameter that belongs to no module of its own."""
    directory = tiny_vision_checkpoint(tmp_path, "llava_next")
    model = exact.enable(AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32))
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with RolloutPolicy.from_pretrained(str(directory), dtype="float32", log_stats=False) as policy:
        batch = policy.add_picture_features(policy.rollout(PROMPTS[:1], PARAMS, use_tqdm=False))
        held = exact.inputs(batch, features=True)
        assert differing(model, batch, **held) == 0
        model.model.image_newline.requires_grad_(True)
        with pytest.raises(ConfigError, match="'model.image_newline' requires a gradient"):
            differing(model, batch, **held)
        model.model.image_newline.requires_grad_(False).add_(0.5)
        with pytest.raises(ConfigError, match="of another vision tower"):
            differing(model, batch, **held)
        policy.update_weights({"model.image_newline": model.model.image_newline}, partial=True)
        again = policy.add_picture_features(policy.rollout(PROMPTS[:1], PARAMS, use_tqdm=False))
        for features in (True, False):
            assert differing(model, again, **exact.inputs(again, features=features)) == 0


def test_trls_loss_gets_inputs_that_compute_the_sampled_log_probs(checkpoint, trainer):
    with RolloutPolicy.from_pretrained(str(checkpoint), dtype="float32", log_stats=False) as policy:
        batch = policy.rollout(PROMPTS, PARAMS, num_samples=2, use_tqdm=False)
        assert policy.stats.pictures.num_encoded == 2
    inputs = to_trl(batch)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    pictures = {name: inputs[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
    width = inputs["completion_ids"].shape[1]
    values = exact.token_logprobs(trainer, ids, mask, temperature=1.0, **pictures)[:, -width:]
    real = inputs["completion_mask"].bool()
    assert torch.equal(values[real], inputs["old_per_token_logps"][real])
    assert inputs["num_images"] == [1, 1, 2, 2, 0, 0]


def test_features_of_a_model_without_a_tower_are_refused(checkpoint, tmp_path):
    with RolloutPolicy.from_pretrained(str(checkpoint), dtype="float32", log_stats=False) as policy:
        batch = policy.rollout(PROMPTS[:1], PARAMS, use_tqdm=False)
    with RolloutPolicy.from_pretrained(str(tiny_checkpoint(tmp_path)), log_stats=False) as policy:
        with pytest.raises(RequestError, match="1 pictures.*takes no pictures"):
            policy.add_picture_features(batch)
        with pytest.raises(RequestError, match="a TensorDict as RolloutPolicy.rollout returns it"):
            policy.add_picture_features({"pictures": 1})
