"""The examples run as they are, and the policies of their trainings learn because they are rewarded."""

import asyncio
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ["--learning-rate", "1e-4", "--steps", "6"]

sys.path.append(str(EXAMPLES))  # as for the command `python examples/NAME.py`: some import examples/grpo.py


def load(name: str):
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run of examples/grpo.py that is just long enough to see it learn: its folder and its metrics."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("grpo")
    return out, load("grpo").main([*SHORT, "--warm-up-steps", "150", "--save-every", "1", "--out", str(out)])


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """One step of examples/grpo.py on a policy that knows next to nothing: its folder and its metrics."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("first_step")
    return out, load("grpo").main(["--steps", "1", "--warm-up-steps", "10", "--out", str(out)])


@pytest.mark.parametrize("name", ["generate", "rollout", "update_weights", "worker_extension"])
def test_short_examples_are_short(name):
    assert (EXAMPLES / f"{name}.py").read_text().count("\n") < 55


def test_generate_prints_every_prompt(capsys):
    example = load("generate")
    example.main([])
    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in example.PROMPTS)


def test_worker_extension_prints_a_norm_for_every_layer(capsys):
    load("worker_extension").main([])
    norms = re.findall(r"layer +\d: mean norm +([0-9.]+)\n", capsys.readouterr().out)
    assert len(norms) >= 2 and all(float(norm) > 0 for norm in norms)


def test_update_weights_reaches_the_engine_in_every_way(capsys):
    load("update_weights").main([])
    printed = capsys.readouterr().out
    for version, name in enumerate(("shm", "store", "gloo", "published store", "checkpoint"), start=1):
        assert f"{name}: UpdateReport(version={version}," in printed
    assert "tokens: [0, " in printed


@pytest.mark.slow
def test_replicas_loses_no_token_when_one_is_killed(capsys):
    load("replicas").main([])
    printed = capsys.readouterr().out
    assert "the tokens are others than before: True\n" in printed
    assert re.search(r"killed process \d+ of replica 0 while it had [1-9]\d* requests\n", printed)
    assert "24 samples of 24 came, their tokens the same: True\n" in printed
    assert re.search(r"replica 0 is back as process \d+, with version 1\n", printed)


def test_grpo_colocated_learns_in_turns(capsys):
    rewards = load("grpo_colocated").main(["--steps", "12"])
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1
    assert "policy 12 inplace" in capsys.readouterr().out


def test_rollout_agrees_with_the_trainer_before_and_after_an_update(capsys):
    load("rollout").main([])
    printed = capsys.readouterr().out
    assert "policy 0: largest |log-prob difference| 0.0\n" in printed
    assert "policy 1: largest |log-prob difference| 0.0\n" in printed


@pytest.mark.slow
def test_grpo_learns_within_six_steps(short_run):
    accuracy = [row["accuracy"] for row in short_run[1]]
    assert accuracy[-1] > accuracy[0] + 0.15
    assert [row["max_logprob_diff"] for row in short_run[1]] == [0.0] * 7


@pytest.mark.slow
def test_grpo_agrees_with_the_trainer_at_every_step(first_step):
    assert [row["max_logprob_diff"] for row in first_step[1]] == [0.0] * 2


@pytest.mark.slow
def test_grpo_says_what_rollouts_and_training_took(first_step):
    rows = first_step[1]
    assert all(row["rollout_seconds"] > 0 and row["training_seconds"] > 0 for row in rows)
    given = [{"rollout_seconds": 3.0, "training_seconds": 1.0}, {"rollout_seconds": 1.0, "training_seconds": 2.0}]
    assert load("grpo").time_shares(given, 10.0) == "10 s: rollouts 40%, training 30%, evaluation and the rest 30%"


@pytest.mark.slow
def test_grpo_writes_its_record(first_step):
    out, rows = first_step
    written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert written == rows
    figures = "reward accuracy tokens_per_second update_ms rollout_seconds training_seconds max_logprob_diff"
    assert set(rows[0]) == {"step", *figures.split()}
    samples = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [sample["policy_version"][0] for sample in samples] == [0] * 256 + [1] * 256
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_samples_of_grpo_can_be_made_again(first_step, capsys):
    assert main(["replay", str(first_step[0] / "rollouts.jsonl")]) == 0  # nothing was rewarded, so nothing changed
    assert capsys.readouterr().out.endswith("512 of 512 samples made again, equal to the bit\n")


def test_one_changed_weight_is_named_for_every_sample_of_grpo(first_step, tmp_path, capsys):
    policy, changed = first_step[0] / "policy", tmp_path / "changed"
    shutil.copytree(policy, changed)
    model = AutoModelForCausalLM.from_pretrained(policy)
    next(model.parameters()).data[3, 5] += 0.5
    model.save_pretrained(changed)
    assert main(["replay", str(first_step[0] / "rollouts.jsonl"), "--model", str(changed)]) == 1
    assert capsys.readouterr().out.count("  other weights: digest ") == 512


@pytest.mark.slow
def test_samples_of_all_steps_of_grpo_can_be_made_again_with_their_weights(short_run, capsys):
    out = short_run[0]
    steps = [option for path in (out / "steps").iterdir() for option in ("--weights", str(path))]
    assert main(["replay", str(out / "rollouts.jsonl"), *steps]) == 0
    assert capsys.readouterr().out.endswith("1792 of 1792 samples made again, equal to the bit\n")


@pytest.mark.slow
def test_grpo_trains_a_given_checkpoint_and_learns_nothing_from_shuffled_advantages(short_run, tmp_path):
    options = ["--model", str(short_run[0] / "policy"), "--micro-batch", "100", "--shuffle-advantages"]
    rows = load("grpo").main([*SHORT, *options, "--out", str(tmp_path)])
    assert rows[0]["accuracy"] == short_run[1][0]["accuracy"]
    assert max(row["accuracy"] for row in rows) < rows[0]["accuracy"] + 0.1
    assert max(row["max_logprob_diff"] for row in rows) == 0.0


@pytest.mark.slow
def test_grpo_samples_the_same_with_drafted_tokens_over_words_that_come_again(short_run, tmp_path):
    options = ["--model", str(short_run[0] / "policy"), "--steps", "2", "--words", "40"]
    for speculation in ("off", "auto"):
        load("grpo").main([*options, "--speculation", speculation, "--out", str(tmp_path / speculation)])
    off, auto = (sorted((tmp_path / name / "rollouts.jsonl").read_text().splitlines()) for name in ("off", "auto"))
    assert off == auto and len(off) == 3 * 256


@pytest.fixture(scope="module")
def ppo_step(first_step, tmp_path_factory):
    """One step of examples/ppo.py on the policy of `first_step`: its folder and its metrics."""
    out = tmp_path_factory.mktemp("ppo")
    return out, load("ppo").main(["--model", str(first_step[0] / "policy"), "--steps", "1", "--out", str(out)])


@pytest.mark.slow
def test_ppo_starts_on_policy_at_every_step(ppo_step):
    assert [row["max_logprob_diff"] for row in ppo_step[1]] == [0.0] * 2
    assert all(row["entropy"] > 0 for row in ppo_step[1])


@pytest.mark.slow
def test_ppo_leaves_the_policy_that_sampled(short_run, tmp_path):
    rows = load("ppo").main(["--model", str(short_run[0] / "policy"), "--steps", "2", "--out", str(tmp_path)])
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 3
    assert all(row["kl"] > 0 and row["entropy"] > 0 for row in rows)


@pytest.mark.slow
def test_ppo_writes_its_record(ppo_step):
    out, rows = ppo_step
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == rows
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ppo_makes_its_own_policy(tmp_path):
    load("ppo").main(["--warm-up-steps", "2", "--steps", "0", "--out", str(tmp_path)])
    assert (tmp_path / "policy" / "config.json").exists()


@pytest.mark.slow
def test_distill_scores_and_trains_in_both_ways(tmp_path):
    torch.set_num_threads(1)
    options = ["--steps", "1", "--warm-up-steps", "4", "--teacher-steps", "4", "--out", str(tmp_path)]
    history = load("distill").main(options)
    for way, rows in history.items():
        assert [json.loads(line) for line in (tmp_path / f"{way}.jsonl").read_text().splitlines()] == rows
        assert [row["max_logprob_diff"] for row in rows] == [0.0] * 2 and all(row["reverse_kl"] != 0 for row in rows)
    assert history["GRPO"][0] == history["distillation"][0]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_student_learns_from_its_teacher_without_a_reward(tmp_path):
    history = load("distill").main(["--out", str(tmp_path)])
    distilled, rewarded = ([row["accuracy"] for row in history[way]] for way in ("distillation", "GRPO"))
    assert min(distilled[-1], rewarded[-1]) > distilled[0] + 0.5
    kl = [row["reverse_kl"] for row in history["distillation"]]
    assert kl[-1] < kl[0] / 2
    assert max(row["max_logprob_diff"] for rows in history.values() for row in rows) == 0.0


def group_maker(example):
    """A function from a version and rewards to a group for `example.Supply`."""

    def make(version, rewards):
        sample = SimpleNamespace(version_spans=[SimpleNamespace(policy_version=version)])
        return example.Group(SimpleNamespace(outputs=[sample]), rewards)

    return make


@pytest.fixture(scope="module")
def async_step(first_step, tmp_path_factory):
    """One step of examples/async_grpo.py on the policy of `first_step`: its folder and its metrics."""
    out, model = tmp_path_factory.mktemp("async_grpo"), str(first_step[0] / "policy")
    return out, load("async_grpo").main(["--model", model, "--steps", "1", "--verify", "--out", str(out)])


def test_async_grpo_has_the_log_probs_of_each_tokens_own_version(async_step):
    assert [row["max_logprob_diff"] for row in async_step[1]] == [0.0] * 2
    assert async_step[1][0]["mean_weight"] == 1.0  # all of version 0


@pytest.mark.slow
def test_async_grpo_trains_on_answers_of_earlier_versions(short_run, tmp_path):
    options = ["--model", str(short_run[0] / "policy"), "--steps", "2", "--verify"]
    rows = load("async_grpo").main([*options, "--out", str(tmp_path)])
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 3
    assert set(rows[0]["staleness"]) == {"0"}
    assert max(int(age) for age in rows[-1]["staleness"]) in range(1, 5)
    assert rows[-1]["mean_weight"] != 1.0


def test_async_grpo_writes_its_record(async_step):
    out, rows = async_step
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == rows


@pytest.mark.slow
def test_async_grpo_with_no_staleness_waits_for_answers_of_the_live_version(short_run, tmp_path):
    options = ["--model", str(short_run[0] / "policy"), "--max-staleness", "0", "--steps", "2"]
    rows = load("async_grpo").main([*options, "--out", str(tmp_path)])
    assert [set(row["staleness"]) for row in rows] == [{"0"}] * 3
    assert [row["mean_weight"] for row in rows] == [1.0] * 3
    assert rows[-1]["stale_groups"] > 0


@pytest.mark.slow
def test_async_grpo_makes_its_own_policy(tmp_path):
    load("async_grpo").main(["--warm-up-steps", "2", "--steps", "0", "--out", str(tmp_path)])
    assert (tmp_path / "policy" / "config.json").exists()


def test_async_grpo_gives_up_flat_groups_first_and_then_the_oldest():
    example = load("async_grpo")
    supply, group_of = example.Supply(max_staleness=0), group_maker(example)
    flat, oldest = group_of(0, [1.0, 1.0]), group_of(0, [0.0, 1.0])
    later = [group_of(0, [1.0, 0.0]) for _ in range(example.BATCH)]
    for group in [oldest, flat, *later]:
        supply.put(group)
    taken = asyncio.run(supply.take(0))
    assert len(taken) == example.BATCH and all(a is b for a, b in zip(taken, later, strict=True))
    assert supply.num_surplus == 2


def test_async_grpo_asks_for_no_more_while_a_whole_batch_that_teaches_waits():
    example = load("async_grpo")
    supply, group_of = example.Supply(max_staleness=1), group_maker(example)

    async def run():
        for rewards in [[0.0, 0.0]] + [[0.0, 1.0]] * (example.BATCH - 1):
            await supply.need()
            supply.put(group_of(0, rewards))
        await supply.need()  # instead of the flat one
        supply.put(group_of(0, [0.0, 1.0]))
        for version in (1, 2):  # a batch is taken, then one is found to be too old
            needing = asyncio.create_task(supply.need())
            await asyncio.sleep(0)
            assert not needing.done()
            taking = asyncio.create_task(supply.take(version))
            await needing
            for _ in range(example.BATCH):
                supply.put(group_of(0, [0.0, 1.0]))
            taking.cancel()

    asyncio.run(run())


def test_async_grpo_drops_groups_with_a_token_that_is_too_old():
    example = load("async_grpo")
    supply, group_of = example.Supply(max_staleness=1), group_maker(example)
    for version in [0] * 3 + [1] * (example.BATCH - 3):
        supply.put(group_of(version, [0.0, 1.0]))

    async def take():
        taking = asyncio.create_task(supply.take(2))
        await asyncio.sleep(0)
        assert not taking.done()
        for _ in range(3):
            supply.put(group_of(2, [0.0, 1.0]))
        return await taking

    assert [group.oldest_version for group in asyncio.run(take())] == [1] * (example.BATCH - 3) + [2] * 3
    assert supply.num_stale == 3 and supply.num_surplus == 0


def test_async_grpo_truncates_importance_weights():
    old = torch.tensor([-1.0, -1.0, -3.0])
    new = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    weights = load("async_grpo").importance_weights(new, old)
    assert weights.tolist() == pytest.approx([1.0, 0.3678794, 2.0])
    assert not weights.requires_grad


@pytest.mark.slow
def test_grpo_ray_samples_the_next_batch_while_it_trains_on_one(short_run, tmp_path):
    options = ["--placement", "processes", "--model", str(short_run[0] / "policy"), "--steps", "3", "--verify"]
    rows = load("grpo_ray").main([*options, "--out", str(tmp_path)])
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 4
    assert set(rows[0]["staleness"]) == {"0"} and rows[0]["mean_weight"] == 1.0
    for row in rows[1:]:
        assert "1" in row["staleness"] and set(row["staleness"]) <= {"0", "1"}
    assert rows[-1]["mean_weight"] != 1.0 and rows[-1]["regenerated"] == 0
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [["grpo"], ["ppo"], ["async_grpo", "--verify"], ["grpo_ray", "--placement", "processes", "--verify"]],
    ids=lambda options: options[0],
)
def test_an_example_lifts_accuracy_from_below_45_to_above_90_percent(options, seed, tmp_path):
    name, *rest = options
    rows = load(name).main([*rest, "--seed", str(seed), "--out", str(tmp_path)])
    assert rows[0]["accuracy"] < 0.45
    assert rows[-1]["accuracy"] > 0.9
    assert max(row["max_logprob_diff"] for row in rows) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "control",
    [
        ["grpo", "--shuffle-advantages"],
        ["ppo", "--shuffle-rewards"],
        ["async_grpo", "--shuffle-advantages"],
        ["grpo_ray", "--shuffle-advantages", "--placement", "processes"],
    ],
    ids=lambda control: control[0],
)
def test_an_example_whose_rewards_are_shuffled_stays_below_50_percent(control, seed, tmp_path):
    name, *rest = control
    rows = load(name).main([*rest, "--seed", str(seed), "--out", str(tmp_path)])
    assert max(row["accuracy"] for row in rows if "accuracy" in row) < 0.5
