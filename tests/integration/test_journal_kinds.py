"""Journals of runs with pictures, adapters and teachers: after a kill the rows are those of an undisturbed run."""

import numpy as np
import pytest

from envs_adapters import Observation
from rollout_engine import RequestError, RolloutPolicy, SamplingParams, Teacher
from rollout_engine.batches.jsonl import samples
from rollout_engine.rollouts.journal.journal import JournalOptions
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint
from tests.unit.rollouts.killed_writes import killed_at

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
SIZES = dict(num_kv_blocks=128, max_model_len=256, log_stats=False, num_threads=1)
KINDS = ("pictures", "adapter", "teacher")


def asked(seed, text):
    parts = [{"type": "image", "image": random_picture(seed, 40, 24)}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


class Turns:
    """Three turns, with a picture in each if the class `shows` them."""

    shows = False

    def reset(self, seed):
        self.seed, self.turn = seed % 97, 0
        return asked(self.seed, "begin") if self.shows else f"begin {self.seed}: "

    def step(self, action):
        self.turn += 1
        message = f" turn {self.turn}: "
        if self.shows:
            shown = np.asarray(random_picture(self.seed + self.turn))
            message = [{"role": "user", "content": [{"type": "image", "image": shown}]}]
        return Observation(message, float(len(action.token_ids)), terminated=self.turn == 3)


class Shows(Turns):
    shows = True


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    text, eyes, larger = (tmp_path_factory.mktemp(name) for name in ("text", "eyes", "larger"))
    return {
        "text": tiny_checkpoint(text),
        "pictures": tiny_vision_checkpoint(eyes, "qwen2_5_vl"),
        "larger": tiny_checkpoint(larger, seed=7),
    }


@pytest.fixture(scope="module")
def teacher(checkpoints):
    with Teacher(checkpoints["larger"], name="big", **SIZES) as made:
        yield made


@pytest.fixture
def new_policy(checkpoints):
    """Start an engine anew, as a trainer does after a kill."""
    made = []

    def start(kind):
        path = checkpoints["pictures" if kind == "pictures" else "text"]
        more = {"max_loras": 1, "max_lora_rank": 8} if kind == "adapter" else {}
        made.append(RolloutPolicy.from_pretrained(str(path), **SIZES, **more))
        return made[-1]

    yield start
    for policy in made:
        policy.shutdown()


def options_of(kind, teacher):
    """Arguments of a rollout of this kind, made anew as by another process."""
    if kind == "adapter":
        return {"lora_request": random_adapter(tiny_model(), "a", seed=3)}
    return {"teachers": [teacher]} if kind == "teacher" else {}


def rows_of(kind):
    if kind == "pictures":
        return [{"messages": asked(index, f"row {index}"), "wanted": index} for index in range(6)]
    return [{"prompt": f"row {index} =", "wanted": index} for index in range(6)]


def reward(completion_ids, wanted, **others):
    return [len(ids) + number for ids, number in zip(completion_ids, wanted, strict=True)]


def values_of(*batches):
    """(group, sample, episode) -> all that a sample holds; pictures by digest."""
    found = {}
    for batch in batches:
        for index, sample in enumerate(samples(batch)):
            placed = [(each["start"], each["end"], each["picture"].digest) for each in sample.pop("pictures", ())]
            sample.pop("messages", None)
            taught = batch["teacher", "big", "log_probs"][index] if "teacher" in batch.keys() else None
            key = sample["group_id"], sample["sample_index"], sample.get("episode_id")
            assert key not in found, f"{key} came twice"
            found[key] = sample, placed, None if taught is None else taught[taught != 0].tolist()
    return found


def collect(policy, kind, teacher, journal, batches):
    options = {"num_samples": 2, "groups_per_batch": 2, "max_staleness": None, "seed": 4, "reward_fn": reward}
    kept = None if journal is None else JournalOptions(directory=str(journal), progress_tokens=2)
    options |= {"max_in_flight": 3, "journal": kept} | options_of(kind, teacher)
    with policy.collect(rows_of(kind), PARAMS, **options) as collector:
        for batch in collector:
            batches.append(batch)


def play(policy, kind, teacher, journal, batches):
    options = {"num_episodes": 2, "num_samples": 2, "seed": 4, "use_tqdm": False, "journal": journal}
    env = Shows if kind == "pictures" else Turns
    batches.append(policy.rollout(None, PARAMS, env=env, **options, **options_of(kind, teacher)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [collect, play])
def test_rows_after_a_kill_are_those_of_an_undisturbed_run(new_policy, teacher, tmp_path, run, kind):
    whole = []
    with killed_at(0) as writes:
        run(new_policy(kind), kind, teacher, tmp_path / "whole", whole)
    expected, num_writes = values_of(*whole), len(writes)
    assert num_writes > 10
    if kind == "pictures":
        assert all(placed for _, placed, _ in expected.values())
    if kind == "teacher":
        assert all(taught for *_, taught in expected.values())
    for number in (num_writes // 3, num_writes - 4):
        batches, journal = [], tmp_path / str(number)
        with killed_at(number):
            run(new_policy(kind), kind, teacher, journal, batches)
        again = []
        run(new_policy(kind), kind, teacher, journal, again)
        found = values_of(*batches, *again)
        assert found.items() <= expected.items()
        assert len(found) >= len(expected) - 4, "one batch may be in doubt"


def test_a_picture_that_was_changed_meanwhile_is_not_put_to_other_samples(new_policy, tmp_path):
    path = tmp_path / "a.png"
    rows = [{"messages": [{"role": "user", "content": [{"type": "image", "image": path}]}]} for _ in range(3)]
    options = {"num_samples": 2, "groups_per_batch": 3, "seed": 4}
    kept = JournalOptions(directory=str(tmp_path / "journal"), progress_tokens=2)
    random_picture(1).save(path)
    with killed_at(8), new_policy("pictures").collect(rows, PARAMS, journal=kept, **options) as collector:
        next(collector)
    random_picture(2).save(path)
    with new_policy("pictures").collect(rows, PARAMS, journal=kept, **options) as collector:
        with pytest.raises(RequestError, match=r"dataset\[\d\]=.*the pictures that its group began with"):
            next(collector)
    random_picture(1).save(path)
    with new_policy("pictures").collect(rows, PARAMS, journal=kept, **options) as collector:
        assert len(next(collector)) == 6


def test_samples_of_another_adapter_of_the_same_name_do_not_continue(new_policy, tmp_path, caplog):
    options = {"num_samples": 2, "groups_per_batch": 2, "max_staleness": None, "seed": 4}
    kept = JournalOptions(directory=str(tmp_path), progress_tokens=1)

    def run(seed, batches, journal):
        lora = random_adapter(tiny_model(), "a", seed=seed)
        with new_policy("adapter").collect(
            rows_of("adapter"), PARAMS, lora_request=lora, journal=journal, **options
        ) as collector:
            for batch in collector:
                batches.append(batch)

    whole, first, second = [], [], []
    run(9, whole, None)
    with killed_at(20):
        run(8, first, kept)
    run(9, second, kept)
    assert "are sampled anew" in caplog.text
    expected, found = values_of(*whole), values_of(*second)
    assert found and found.items() <= expected.items()
