"""The examples that train in environments run as they are, and their games and tasks have the rules they state."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

from envs_adapters import Action
from rollout_engine import read_jsonl

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # as for the command `python examples/NAME.py`


def load(name: str):
    return importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tool_use", "two_player", "short_to_long"])
def test_an_example_writes_its_record(name, tmp_path):
    rows = load(name).main(["--warm-up-steps", "60", "--steps", "1", "--out", str(tmp_path)])
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows
    assert [row["max_logprob_diff"] for row in rows] == [0.0, 0.0]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    num_seats = {"two_player": 2}.get(name, 1)
    assert len({sample["episode_id"] for sample in samples}) == 256
    assert {sample["seat"] for sample in samples} == set(range(num_seats))
    for sample in samples:
        assert {version for version in sample["policy_version"] if version >= 0} == {1}
        assert sample["group_id"] % num_seats == sample["seat"], "GRPO compares the same seat of the same start"
        assert sample["reward"] == sum(sample["turn_rewards"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_self_play_finds_the_perfect_game(seed, tmp_path):
    rows = load("two_player").main(["--seed", str(seed), "--out", str(tmp_path)])
    assert rows[0]["perfect"] < 0.25 and rows[-1]["perfect"] > 0.9
    assert rows[0]["careless"] < 0.75 and rows[-1]["careless"] > 0.95


@pytest.mark.slow
def test_self_play_whose_rewards_are_shuffled_does_not_find_the_perfect_game(tmp_path):
    rows = load("two_player").main(["--shuffle-advantages", "--out", str(tmp_path)])
    assert max(row["perfect"] for row in rows) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_calculator_is_called_once_it_pays(seed, tmp_path):
    rows = load("tool_use").main(["--seed", str(seed), "--out", str(tmp_path)])
    assert rows[0]["calls"] < 0.1 and rows[-1]["calls"] > 0.95
    assert rows[0]["accuracy"] < 0.2 and rows[-1]["accuracy"] > 0.95


@pytest.mark.slow
def test_a_calculator_is_not_called_where_rewards_are_shuffled(tmp_path):
    rows = load("tool_use").main(["--shuffle-advantages", "--out", str(tmp_path)])
    assert max(row["calls"] for row in rows) < 0.3 and max(row["accuracy"] for row in rows) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_long_words_are_learned_though_none_was_shown(seed, tmp_path):
    rows = load("short_to_long").main(["--seed", str(seed), "--out", str(tmp_path)])
    assert rows[0]["accuracy"] < 0.75 and rows[-1]["accuracy"] > max(0.85, rows[0]["accuracy"] + 0.2)


@pytest.mark.slow
def test_long_words_are_not_learned_where_rewards_are_shuffled(tmp_path):
    rows = load("short_to_long").main(["--shuffle-advantages", "--out", str(tmp_path)])
    assert max(row["accuracy"] for row in rows) < rows[0]["accuracy"] + 0.1


AGENTS = ["agent_chat.py", "agent_responses.py", "agent_messages.py"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--threads"]])
def test_training_an_agent_writes_its_record(options, tmp_path):
    rows = load("train_agent").main([*options, "--warm-up-steps", "60", "--steps", "1", "--out", str(tmp_path)])
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows
    assert [row["max_logprob_diff"] for row in rows] == [0.0, 0.0]
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len({sample["episode_id"] for sample in samples}) == 96 and not any(sample["error"] for sample in samples)
    assert {len(sample["info"]["task"]["sum"]) for sample in samples} == {7}


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_the_model_behind_an_agent_learns_to_call_its_calculator(agent, tmp_path):
    rows = [row for row in load("train_agent").main([agent, "--threads", "--out", str(tmp_path)]) if "calls" in row]
    assert rows[0]["calls"] < 0.2 and rows[-1]["calls"] > 0.9
    assert rows[0]["accuracy"] < 0.3 and rows[-1]["accuracy"] > 0.7


@pytest.mark.slow
def test_the_model_behind_an_agent_does_not_learn_where_rewards_are_shuffled(tmp_path):
    rows = load("train_agent").main(["--threads", "--shuffle-advantages", "--out", str(tmp_path)])
    assert max(row["calls"] for row in rows if "calls" in row) < 0.5


def last_of_game(left, *said):
    """The last observation of a game that begins with `left` sticks."""
    game = load("two_player").Sticks()
    game.reset(0)
    game.left = left
    for turn, words in enumerate(said):
        seen = game.step(Action(words, seat=turn % 2))
    return seen


def test_who_takes_the_last_stick_wins():
    seen = last_of_game(5, "4", "1")
    assert (seen.messages, seen.seat, seen.terminated) == ("1", 0, False)
    seen = last_of_game(5, "4", "1", "0")
    assert (seen.reward, seen.terminated) == ({0: 1.0, 1: 0.0}, True)


@pytest.mark.parametrize("words", ["5", "6", "1", "", "4 ", "44", "-1", "x"])
def test_who_says_what_cannot_be_loses(words):
    seen = last_of_game(6, "5", words)
    assert (seen.reward, seen.terminated) == ({0: 1.0, 1: 0.0}, True)


def wins(opponent, first_moves=()):
    """Whether the perfect player, but for its first moves, beats the opponent from each of 100 starts."""
    example, won = load("two_player"), []
    for seed in range(100):
        game, draws = example.Against(opponent), random.Random(seed)
        game.reset(seed)
        words = next((str(move) for move in first_moves if move in example.may_leave(game.left)), None)
        seen = game.step(Action(words or str(example.perfect(game.left, draws))))
        while not seen.terminated:
            assert seen.messages == str(game.left)
            seen = game.step(Action(str(example.perfect(game.left, draws))))
        won.append(seen.reward == 1.0)
    return won


def test_a_player_without_mistakes_wins_every_game():
    example = load("two_player")
    assert all(wins(example.careless)) and all(wins(example.perfect))


def test_the_perfect_opponent_punishes_one_mistake():
    assert not any(wins(load("two_player").perfect, first_moves=[3, 6, 7, 10, 13]))


@pytest.mark.slow
def test_reading_digits_is_exact_and_keeps_its_pictures(tmp_path):
    rows = load("read_digits").main(["--steps", "1", "--out", str(tmp_path)])
    assert [row["max_logprob_diff"] for row in rows] == [0.0, 0.0]
    samples = read_jsonl(tmp_path / "rollouts.jsonl")
    assert len(samples) == 128 and all(len(sample["pictures"]) == 1 for sample in samples)
    shown = {sample["pictures"][0]["picture"] for sample in samples}
    assert {file.stem for file in (tmp_path / "pictures").glob("*.png")} == shown and len(shown) == 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_are_read_from_pixels(seed, tmp_path):
    rows = load("read_digits").main(["--seed", str(seed), "--out", str(tmp_path)])
    assert rows[0]["greedy"] < 0.3 and rows[-1]["greedy"] > 0.7


@pytest.mark.slow
def test_digits_are_not_read_from_blank_pictures(tmp_path):
    rows = load("read_digits").main(["--blank", "--out", str(tmp_path)])
    assert max(row["greedy"] for row in rows if "greedy" in row) < 0.3


GUESS = ["--conversations", "500", "--answers", "1", "2", "3", "4", "5", "6", "7"]


def first_environment(directory):
    """A file with the first environment of docs/environments.md; returns the example's target."""
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    block = next(block for block in text.split("```")[1::2] if "class GuessNumber" in block)
    path = directory / "guess_number.py"
    path.write_text(block.removeprefix("python").partition("batch = ")[0])
    return f"{path}:GuessNumber"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["guide", "reasoning_gym:spell_backward"])
def test_any_environment_trains_with_one_command(target, tmp_path, capsys):
    arguments = [first_environment(tmp_path), *GUESS] if target == "guide" else [target, "--option", "max_word_len=4"]
    rows = load("train_env").main([*arguments, "--warm-up-steps", "30", "--steps", "1", "--out", str(tmp_path / "out")])
    assert [row["max_logprob_diff"] for row in rows] == [0.0, 0.0]
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["learning_curve.png", "metrics.jsonl", "policy", "rollouts.jsonl"]
    samples = [json.loads(line) for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 256 and not any(sample["error"] for sample in samples)
    first = samples[0]["messages"][1]["content"]
    assert f"  assistant: {first}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_any_environment_trains_a_given_checkpoint(tmp_path):
    example, target = load("train_env"), first_environment(tmp_path)
    made = example.main([target, *GUESS, "--warm-up-steps", "30", "--steps", "0", "--out", str(tmp_path / "made")])
    given = ["--model", str(tmp_path / "made/policy"), "--max-tokens", "16", "--steps", "1"]
    rows = example.main([target, *given, "--out", str(tmp_path / "given")])
    assert [rows[0][key] for key in ("reward", "greedy")] == [made[0][key] for key in ("reward", "greedy")]
    assert not (tmp_path / "given/policy").exists()
    assert [row["max_logprob_diff"] for row in rows] == [0.0, 0.0]


def test_a_careless_teacher_makes_mistakes_of_the_same_form():
    wrong, draws = load("train_env").wrong, random.Random(0)
    words = [f"word{number}" for number in range(100, 200)]
    assert wrong("word123", words, draws) == "word132"
    assert wrong("word122", words, draws) in set(words) - {"word122"}
    assert wrong("Yes", ["No", "Yes"], draws) == "No"


def test_what_all_questions_have_in_common_is_one_token():
    def says(*texts):
        return [{"role": "user", "content": text} for text in texts]

    words_of = load("train_env").words_of
    assert words_of([says("Add 1+2 now."), says("Add 4+5 now.")]) == ["Add ", " now."]
    assert words_of([says("Guess.", "Higher."), says("Guess.", "Lower.")]) == ["Guess.", "Higher.", "Lower."]


def test_an_environment_of_which_nothing_is_known_needs_answers(tmp_path):
    with pytest.raises(SystemExit, match="Give --answers"):
        load("train_env").main([first_environment(tmp_path), "--conversations", "2", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("name, said", [(":GuessNumbr", "Classes with a step in it: GuessNumber"), ("", ":MyClass")])
def test_a_class_that_is_not_in_the_file_is_told_at_once(tmp_path, name, said):
    file, _ = first_environment(tmp_path).rsplit(":", 1)
    with pytest.raises(SystemExit, match=said):
        load("train_env").main([file + name, "--answers", "1", "--out", str(tmp_path / "out")])


def test_words_to_measure_with_are_not_trained_on_and_only_the_right_answer_pays():
    example = load("short_to_long")
    training, unseen = example.split_words()
    assert [*training] == [*unseen] == [3, 4, 5, 6, 7]
    for length in training:
        assert len(unseen[length]) == example.NUM_UNSEEN and not {*training[length]} & {*unseen[length]}
        assert {len(word) for word in training[length] + unseen[length]} == {length}
    env = example.Spell({3: ["cat"]})
    assert env.reset(0) == "cat"
    assert [env.step(Action(text)).reward for text in ("tac", "cat", "tac ", "")] == [1.0, 0.0, 0.0, 0.0]
