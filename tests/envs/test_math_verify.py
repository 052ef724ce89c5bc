"""Answers judged by the real math-verify."""

import json
import threading

import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import EnvCalls

pytest.importorskip("math_verify")

import math_verify  # noqa: E402

RIGHT = ["\\frac{1}{2}", "42", "(1, 2)", "\\sqrt{8}", "Half of it is 3.\n#### 3", "so it is $x^2+1$", 7]
SAID = ["It is $0.5$.", "\\boxed{42}", "$(1,2)$", "$2\\sqrt{2}$", "I get 3", "$1 + x^2$", "7.0"]
ROWS = [{"prompt": f"problem {number}", "answer": answer} for number, answer in enumerate(RIGHT)]


def judged(spec, seed, text):
    env = spec()
    env.reset(seed)
    return env.step(Action(text)).reward


def test_answers_are_compared_as_mathematics():
    spec = make_env("math_verify", rows=ROWS)
    assert (spec.placement, spec.is_single_turn) == ("processes", True)
    assert [judged(spec, seed, text) for seed, text in enumerate(SAID)] == [1.0] * 7
    assert [judged(spec, seed, "no idea, $-17$") for seed in range(7)] == [0.0] * 7
    assert judged(spec, 0, "") == 0.0


def test_rewards_are_the_packages_own():
    rows = [{"prompt": "?", "answer": right} for right in ("1/3", "\\pi", "\\{1, 2\\}", "x=3")]
    spec = make_env("math_verify", rows=rows)
    for seed, row in enumerate(rows):
        for text in ("$0.333333$", "$\\pi$", "$\\{2, 1\\}$", "$3$", "three"):
            own = math_verify.verify(math_verify.parse(f"${row['answer']}$"), math_verify.parse(text))
            assert judged(spec, seed, text) == float(own), (row, text)


def test_worker_processes_judge(tmp_path):
    path, came = tmp_path / "rows.jsonl", threading.Event()
    path.write_text("\n".join(json.dumps({"problem": "?", "solution": row["answer"]}) for row in ROWS))
    columns = {"prompt_column": "problem", "answer_column": "solution"}
    running = EnvCalls(make_env(f"math_verify:{path}", num_workers=1, **columns), came.set)
    rewards, begun = {}, set()
    try:
        for key in range(len(ROWS)):
            running.reset(key, key)
        while len(rewards) < len(ROWS):
            assert came.wait(120)
            came.clear()
            for key, result in running.take():
                if key in begun:
                    rewards[key] = result.reward
                    running.close(key)
                else:
                    begun.add(key)
                    running.step(key, Action(SAID[key] if key != 3 else "$3$"))
    finally:
        running.end()
    assert rewards == {key: {0: float(key != 3)} for key in range(len(ROWS))}


def test_a_thread_judges_without_a_limit_of_its_own():
    found = []
    thread = threading.Thread(target=lambda: found.append(judged(make_env("math_verify", rows=ROWS), 0, "1/2")))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either their path"),
        ({"rows": ROWS, "answer_column": "solution"}, "the field 'solution' is missing"),
        ({"rows": ROWS, "answer_column": 3}, "the name of a column"),
        ({"rows": [{"prompt": "?", "answer": ""}]}, "cannot be read as mathematics"),
        ({"rows": ROWS, "reward_fn": len}, "Unknown option 'reward_fn'"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(options, message):
    with pytest.raises(ConfigError, match=message):
        make_env("math_verify", **options)
