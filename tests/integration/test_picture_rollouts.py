"""The loop of a trainer over prompts with pictures: rollouts, exact log-probs, updates, files, replays, evaluations."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack
from transformers import AutoModelForImageTextToText

from envs_adapters import Observation
from rollout_engine import RequestError, RolloutPolicy, SamplingParams, advantages, concat, exact, read_jsonl
from rollout_engine.base.pictures import Picture, PlacedPicture, SharedPictures
from rollout_engine.batches.minibatches import minibatches
from rollout_engine.rollouts.explain import explain
from rollout_engine.rollouts.replay import replay
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint

PARAMS = SamplingParams(max_tokens=6)


def asked(*seeds, text="Which?"):
    parts = [{"type": "image", "image": random_picture(seed, 40, 24 + 8 * (seed % 2))} for seed in seeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


PROMPTS = [asked(1), asked(2, 1), [{"role": "user", "content": "No picture."}]]


class Album:
    """Shows a picture in each of three turns; what is said does not matter."""

    def reset(self, seed):
        self.seed, self.turn = seed % 97, 0
        return asked(self.seed)

    def step(self, action):
        self.turn += 1
        shown = np.asarray(random_picture(self.seed + self.turn))
        message = {"role": "user", "content": [{"type": "image", "image": shown}]}
        return Observation([message], float(len(action.token_ids)), terminated=self.turn == 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("trace")


@pytest.fixture
def policy(checkpoint, trace):
    with RolloutPolicy.from_pretrained(str(checkpoint), dtype="float32", step_trace=str(trace)) as policy:
        yield policy


@pytest.fixture
def trainer(checkpoint):
    return exact.enable(AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32))


def _swap(placed):
    """The same place with the picture upside down."""
    arrays = dict(placed.picture.arrays)
    arrays["pixel_values"] = arrays["pixel_values"][::-1]
    return PlacedPicture(placed.start, placed.end, Picture.of(arrays))


def differing(trainer, batch):
    """Sampled tokens whose log-probs differ between engine and trainer."""
    given = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    packed = {"cu_seqlens": batch["cu_seqlens"]} if "cu_seqlens" in batch.keys() else {}
    ours = exact.token_logprobs(trainer, given[0], None if packed else given[1], **packed, **exact.inputs(batch))
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    return int((ours != batch["log_probs", "full"][:, 1:])[sampled].sum())


def test_a_training_step_over_pictures_is_exact_before_and_after(policy, trainer, tmp_path):
    def reward(completions, pictures):
        return [float(len(shown)) + index for index, shown in enumerate(pictures)]

    log, options = tmp_path / "rollouts.jsonl", {"num_samples": 3, "seed": 1, "use_tqdm": False}
    batch = policy.rollout(PROMPTS, PARAMS, **options, reward_fn=reward, log_to=log)
    assert [len(row) for row in batch["pictures"]] == [1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert batch["next", "reward"].flatten().tolist() == [1, 2, 3, 2, 3, 4, 0, 1, 2]
    assert differing(trainer, batch) == 0
    assert differing(trainer, policy.rollout(PROMPTS, PARAMS, **options, layout="packed")) == 0
    parts = list(minibatches(concat([batch, batch]), 5))
    assert sum(differing(trainer, part) for part in parts) == 0
    assert all(report.is_equal for report in replay(policy, read_jsonl(log)))
    others = batch.exclude("pictures")
    others["pictures"] = NonTensorStack(*(tuple(_swap(each) for each in row) for row in batch["pictures"]))
    assert differing(trainer, others) > 0, "pictures decide log-probs"

    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    given = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    (-(exact.token_logprobs(trainer, *given, **exact.inputs(batch)) * advantage)[sampled].mean()).backward()
    of_tower = [each.grad for name, each in trainer.named_parameters() if "visual" in name]
    assert of_tower and all(grad is not None and grad.abs().sum() > 0 for grad in of_tower)
    optimizer.step()
    policy.update_weights(trainer)
    again = policy.rollout(PROMPTS, PARAMS, **options)
    assert differing(trainer, again) == 0
    assert not torch.equal(again["log_probs", "full"], batch["log_probs", "full"])
    assert not any(report.is_equal for report in replay(policy, read_jsonl(log)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llava_next"])
def test_images_of_other_families_are_exact_from_the_message_to_the_trainer(family, tmp_path):
    path = tiny_vision_checkpoint(tmp_path, family)
    trainer = exact.enable(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32))
    with RolloutPolicy.from_pretrained(str(path), dtype="float32", max_num_batched_tokens=16, max_num_seqs=9) as policy:
        batch = policy.rollout(PROMPTS, PARAMS, num_samples=3, seed=1, use_tqdm=False)
        packed = policy.rollout(PROMPTS, PARAMS, num_samples=3, seed=1, use_tqdm=False, layout="packed")
        assert differing(trainer, batch) == differing(trainer, packed) == 0
        scored = policy.score(batch)
    sampled = batch["masks", "all_assistant_mask"]
    assert torch.equal(scored[sampled], batch["log_probs", "full"][sampled])


def test_episodes_whose_observations_are_pictures_are_exact_and_are_replayed(policy, trainer, trace, tmp_path):
    log = tmp_path / "rollouts.jsonl"
    batch = policy.rollout(None, PARAMS, env=Album, num_episodes=2, num_samples=2, seed=4, use_tqdm=False, log_to=log)
    assert batch["error"] == [None] * 4 and [len(row) for row in batch["pictures"]] == [3] * 4
    ids = batch["tokens", "full"]
    placeholder = policy.frontend.client.info.pictures.image_token_id
    for row, pictures in enumerate(batch["pictures"]):
        assert all(set(ids[row, each.start : each.end].tolist()) == {placeholder} for each in pictures)
        assert not batch["masks", "all_assistant_mask"][row, pictures[1].start : pictures[1].end].any()
    assert differing(trainer, batch) == 0
    samples = read_jsonl(log)
    reports = replay(policy, samples)
    assert all(report.is_equal for report in reports) and sum(report.num_tokens for report in reports) > 12
    last = max(place for place, turn in enumerate(samples[0]["turns"]) if turn == 2)
    assert explain(samples[0], last, trace)[1].count(" at ") == 3


class Torn(Album):
    """An album whose second picture is damaged in every second start."""

    def step(self, action):
        observation = super().step(action)
        if self.seed % 2 and self.turn == 1:
            observation.messages[0]["content"][0]["image"] = b"\x89PNG\r\n\x1a\nno picture"
        return observation


def test_a_damaged_picture_fails_its_episode_alone(policy, trainer):
    batch = policy.rollout(None, PARAMS, env=Torn, num_episodes=6, seed=5, use_tqdm=False)
    failed = [error is not None for error in batch["error"]]
    assert any(failed) and not all(failed)
    reasons = {error for error in batch["error"] if error}
    assert all("messages[0]['content'][0]['image']" in reason and "bytes" in reason for reason in reasons)
    assert [len(row) for row in batch["pictures"]] == [1 if each else 3 for each in failed]
    assert differing(trainer, batch) == 0


def test_a_replay_leaves_out_samples_whose_pictures_are_damaged(policy, tmp_path, caplog):
    log = tmp_path / "rollouts.jsonl"
    policy.rollout([asked(1), asked(2)], PARAMS, num_samples=2, seed=6, use_tqdm=False, log_to=log)
    samples = read_jsonl(log)
    broken = tmp_path / "pictures" / f"{samples[0]['pictures'][0]['picture']}.npz"
    for damage in (lambda: broken.write_bytes(broken.read_bytes()[:-40]), broken.unlink):
        damage()
        caplog.clear()
        reports = replay(policy, read_jsonl(log))
        hurt = [sample["pictures"] == samples[0]["pictures"] for sample in samples]
        assert [not report.is_equal for report in reports] == hurt and hurt.count(True) == 2
        for report, sample in zip(reports, samples, strict=True):
            for reason, count in report.left_out.items():
                assert broken.name in reason and count == len(sample["response_token_ids"])
        assert sum(broken.name in record.message for record in caplog.records) == 2


def test_an_evaluation_keeps_pictures_and_tells_them_apart(policy, tmp_path):
    def task(*seeds):
        rows = [{"prompt": asked(seed), "gold": seed} for seed in seeds]
        return {"name": "album", "rows": rows, "reward_fn": lambda completions, gold: [1.0] * len(completions)}

    given = {"sweep": {"settings": {"short": PARAMS}}, "out": tmp_path / "out", "use_tqdm": False}
    report = policy.evaluate(task(1, 2), **given)
    assert len(list((tmp_path / "out" / "pictures").glob("*.npz"))) == 2
    report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,") == 2
    assert len(policy.evaluate(task(1, 2), **given).samples) == 2
    with pytest.raises(RequestError, match="differs in digest"):
        policy.evaluate(task(1, 3), **given)


def test_images_that_the_model_would_not_see_are_refused(policy):
    columns, text = {"images": [[random_picture(1)]]}, [{"role": "user", "content": "Which?"}]
    with pytest.raises(RequestError, match=r"columns\['images'\].*multi_modal_data"):
        policy.rollout([text], PARAMS, columns=columns)
    with pytest.raises(RequestError, match=r"dataset\[0\]\['image'\].*multi_modal_data"):
        list(policy.collect([{"prompt": text, "image": random_picture(1)}], PARAMS, groups_per_batch=1))
    with pytest.raises(RequestError, match=r"'images'.*multi_modal_data"):
        policy.rollout([{"prompt": text, "images": columns["images"][0]}], PARAMS)
    batch = policy.rollout([asked(1)], PARAMS, columns=columns, seed=1, use_tqdm=False)
    assert len(batch["pictures"][0]) == 1


def test_a_score_without_its_pictures_is_noticed(policy, caplog):
    batch = policy.rollout([asked(1)], PARAMS, seed=1, use_tqdm=False)
    with pytest.raises(RequestError, match="a list of PlacedPicture"):
        SharedPictures.of([[random_picture(1)]])
    policy.score(batch)
    assert "placeholder of pictures" not in caplog.text
    policy.score(batch.exclude("pictures"))
    assert "placeholder of pictures" in caplog.text
