"""Programs as episodes: what they get, what becomes of their outputs and ends, and that nothing of them is left."""

import json
import os

import psutil
import pytest

from rollout_engine.rollouts.agents.agent import Agent


def sh(script):
    return ["sh", "-c", script]


PAYS = """echo '{"reward": 0.5}'"""


def test_the_last_line_gives_the_reward(play_one, gateway):
    episode = play_one(sh(f"echo first; {PAYS}"))
    assert (episode.reward, episode.outcome.error, episode.outcome.ended_by) == (0.5, None, "terminated")
    assert episode.outcome.info["output"] == 'first\n{"reward": 0.5}\n' and episode.outcome.info["status"] == 0
    assert gateway.is_closed


def test_it_gets_addresses_task_and_seed_and_no_secret(play, gateway, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-owner")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    task = {"question": "4 + 4", "n": [1, 2.5, None], "text": "Größe\n'\""}
    episodes = play(sh(f"env; cat $ROLLOUT_TASK_FILE; echo; pwd; {PAYS}"), [task, "other"], 2, env={"EXTRA": "1"})
    keys = set()
    for episode in episodes:
        lines = episode.outcome.info["output"].splitlines()
        given = dict(line.split("=", 1) for line in lines[:-3])
        [session] = [each for each in gateway.sessions if each.id == episode.session_id]
        assert given["OPENAI_BASE_URL"] == session.openai_base_url
        assert given["ANTHROPIC_BASE_URL"] == session.anthropic_base_url
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
            assert given[name] == session.api_key
        own = [task, "other"][episode.group]
        assert json.loads(given["ROLLOUT_TASK"]) == json.loads(lines[-3]) == own == episode.outcome.info["task"]
        assert lines[-2] == given["HOME"] and given["HOME"] != os.getcwd() and given["EXTRA"] == "1"
        assert not {"AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "USER"} & given.keys()
        keys.add((given["ROLLOUT_SEED"], given["HOME"]))
    assert len(keys) == 4 and len({seed for seed, _ in keys}) == 2, "the samples of a start have one seed"
    assert len({session.sampling["seed"] for session in gateway.sessions}) == 4, "their answers are drawn anew"


def test_seeds_are_those_of_the_rollout_whatever_is_started_first(play, gateway):
    seeds = [{each.seed for each in play(sh(PAYS), range(3), 2, max_in_flight=number)} for number in (1, 6)]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 6


def test_a_long_task_is_in_its_file_alone(play_one):
    script = f"wc -c < $ROLLOUT_TASK_FILE; echo ${{ROLLOUT_TASK-none}}; {PAYS}"
    episode = play_one(sh(script), ["x" * 200_000])
    assert episode.outcome.info["output"].split("\n")[:2] == ["200002", "none"]


def test_a_directory_that_is_given_is_kept(play_one, tmp_path):
    (tmp_path / "own").mkdir()
    episode = play_one(Agent(sh(f"pwd; touch made; {PAYS}"), cwd=tmp_path / "own"))
    assert episode.outcome.info["output"].startswith(f"{tmp_path / 'own'}\n") and (tmp_path / "own/made").exists()


def test_files_that_may_not_be_changed_are_removed_all_the_same(play_one):
    assert play_one(sh(f"mkdir -p a/b; touch a/b/c; chmod 500 a/b a; {PAYS}")).reward == 0.5


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "script, said",
    [
        ("echo broken >&2; exit 3", "it exited with status 3 (it wrote: broken)."),
        ("kill -SEGV $$", "it was killed by SIGSEGV."),
        ("exit 0", "ended without a reward: print"),
        ("""echo '{"reward": 1}'; echo more""", "ended without a reward"),
        ("""echo '{"reward": "much"}'""", "'much', not a number that is finite"),
        ("""echo '{"reward": 1e300}'""", "not a number that is finite in float32"),
        ("""echo '[[[[{"reward": 1}]]]]'""", "ended without a reward"),
        (f"{PAYS}; exit 1", "it exited with status 1"),
    ],
)
def test_a_program_that_fails_is_an_episode_that_failed(script, said, play_one):
    episode = play_one(sh(script))
    assert said in episode.outcome.error and episode.outcome.ended_by == "error"
    assert episode.reward == 0.0 and "status" in episode.outcome.info


def test_one_that_does_not_start_says_why(play_one, tmp_path):
    file = tmp_path / "agent"
    file.write_text("#!/no/such/interpreter\n")
    file.chmod(0o700)
    assert "it did not start: No such file or directory." in play_one(str(file)).outcome.error


@pytest.mark.quick(1)
@pytest.mark.parametrize("limit", ["timeout", "episode_timeout"])
def test_a_program_whose_time_is_up_is_killed_with_all_that_it_started(limit, play_one, tmp_path):
    listed = tmp_path / "pids"
    script = f"exec 3> {listed}; echo $$ >&3; setsid sleep 1000 & echo $! >&3; echo waiting; sleep 1000"
    episode = play_one(sh(script), **{limit: 1.0})
    if limit == "timeout":
        assert "it did not end within 1 seconds (Agent(timeout=...)), and was killed" in episode.outcome.error
    else:
        assert (episode.outcome.ended_by, episode.outcome.error, episode.reward) == ("episode_timeout", None, 0.0)
    assert episode.outcome.info["output"] == "waiting\n"
    assert not [pid for pid in map(int, listed.read_text().split()) if psutil.pid_exists(pid)]


def test_a_reward_function_judges_the_run_before_its_directory_is_removed(play, gateway):
    def reward(task, output, rows, messages, directory, status):
        with open(f"{directory}/answer") as file:
            return float(file.read()) + task + len(rows) + len(messages) + status + output.count("x")

    script = "echo xx; printf 10 > answer"
    assert [each.reward for each in play(sh(script), [100, 200], reward=reward)] == [112.0, 212.0]


def test_a_limit_of_the_rollout_leaves_the_judgement_to_the_reward_function(play_one):
    episode = play_one(sh("echo done; sleep 1000"), episode_timeout=1.0, reward=lambda output: output.count("done"))
    assert (episode.outcome.ended_by, episode.reward) == ("episode_timeout", 1.0)


@pytest.mark.parametrize(
    "reward, said",
    [(lambda: 1 / 0, "reward= raised ZeroDivisionError: division by zero"), (lambda: "good", "returned 'good'")],
)
def test_a_reward_function_that_fails_fails_the_episode(reward, said, play_one):
    assert said in play_one(sh("true"), reward=reward).outcome.error


def test_no_more_run_at_once_than_may(play, tmp_path):
    script = f"mkdir {tmp_path}/here-$$ && ls -d {tmp_path}/here-* | wc -l; sleep 0.1; rmdir {tmp_path}/here-$$; {PAYS}"
    counts = [int(each.outcome.info["output"].split()[0]) for each in play(sh(script), range(6), max_in_flight=2)]
    assert max(counts) <= 2


def test_the_output_is_bounded(play_one):
    episode = play_one(sh(f"yes | head -c 100000; echo; {PAYS}"), max_output_bytes=100)
    assert len(episode.outcome.info["output"]) == 100 and episode.outcome.info["num_output_bytes"] > 100_000
    assert episode.reward == 0.5
