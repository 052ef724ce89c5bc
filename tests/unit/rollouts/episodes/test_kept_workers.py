"""Worker processes between two rollouts: who gets them, what they play there, and when they end."""

import gc
import os
import subprocess
import sys
import time

import psutil
import pytest

from envs_adapters.base import Action
from rollout_engine.rollouts.episodes import worker_process
from rollout_engine.rollouts.episodes.env_calls import EnvFailure
from rollout_engine.rollouts.episodes.env_wire import Reset, Reuse
from rollout_engine.rollouts.episodes.factory_reference import refer_to
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from rollout_engine.rollouts.episodes.worker_process import WorkerLostError, WorkerProcess
from tests.forking import in_fork
from tests.unit.rollouts.episodes import process_envs
from tests.unit.rollouts.episodes.playing import play


@pytest.fixture
def kept(run_env):
    """Worker processes, none of which may be left after the test."""
    before = set(psutil.Process().children(recursive=True))
    kept = KeptWorkers()
    yield kept
    run_env.end()
    kept.close()
    assert not set(psutil.Process().children(recursive=True)) - before


@pytest.fixture
def play_once(run_env, kept):
    """Play episodes of these seeds, as a rollout does; what they saw, and the processes that they were in."""

    def play_once(factory, seeds=(0,), texts=("a", "a"), kept=kept, **options):
        env = run_env(factory, kept, **{"placement": "processes", "num_workers": 1} | options)
        for key, seed in enumerate(seeds):
            env.calls.reset(key, seed)
        seen = {key: [began.observation.messages] for key, began in env.results(len(seeds))}
        pids = set()
        for text in texts:
            for key in seen:
                env.calls.step(key, Action(text))
            for key, observation in env.results(len(seeds)):
                seen[key].append(getattr(observation, "messages", observation))
                pids.add(getattr(observation, "info", {}).get("pid"))
        env.calls.end()
        return [seen[key] for key in range(len(seeds))], pids - {None}

    return play_once


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("env", [process_envs.DrawsUnseeded, *slow(process_envs.Draws, process_envs.Obeys)])
def test_a_kept_worker_plays_the_episodes_that_a_new_one_plays(play_once, env):
    seeds = [3, 1, 3, 2]
    fresh, first = play_once(env, seeds, kept=None, num_workers=2)
    _, used = play_once(env, [7, 8, 9], texts=("b",) * 5, num_workers=2)
    again, second = play_once(env, seeds, num_workers=2)
    assert again == fresh
    assert second == used and not second & first


@pytest.mark.slow
def test_a_kept_worker_plays_them_where_the_first_user_has_imported_more(play_once):
    fresh, _ = play_once(process_envs.ImportsTorch, [3, 1], kept=None)
    _, used = play_once(process_envs.ImportsTorch, [5])
    assert play_once(process_envs.ImportsTorch, [3, 1]) == (fresh, used)


def test_workers_are_kept_beyond_a_rollout_and_end_with_the_policy(policy):
    first = play(policy, process_envs.SPEC, num_episodes=3)
    second = play(policy, process_envs.SPEC, num_episodes=3)
    pids = [{info["pid"] for info in batch["info"]} for batch in (first, second)]
    assert pids[0] == pids[1] and os.getpid() not in pids[0]
    assert first["tokens", "full"].tolist() == second["tokens", "full"].tolist()
    policy.shutdown()
    assert not any(map(psutil.pid_exists, pids[0]))


def _with_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_VARIABLE", "1")


def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def _with_import_path(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("change", [_elsewhere, *slow(_with_variable, _with_import_path)])
def test_a_new_worker_starts_where_the_kept_one_has_started_otherwise(play_once, monkeypatch, tmp_path, change):
    _, first = play_once(process_envs.Obeys)
    with monkeypatch.context() as changed:
        change(changed, tmp_path)
        _, second = play_once(process_envs.Obeys)
    _, third = play_once(process_envs.Obeys)
    assert not first & second and third == first


def test_a_new_worker_starts_for_other_arguments(play_once):
    sizes = [1, True, 1.0]
    workers = [play_once(process_envs.Obeys, arguments={"size": size})[1] for size in sizes]
    assert len(set.union(*workers)) == len(sizes)
    assert play_once(process_envs.Obeys, arguments={"size": 1})[1] == workers[0]


def test_a_new_worker_starts_once_the_environment_has_been_edited(play_once, tmp_path, monkeypatch):
    program = "class Env:\n  def reset(self, seed): return '{}'\n  def step(self, action): return 'b', 0.0, True, False"
    (tmp_path / "edited_env.py").write_text(program.format("old"))
    monkeypatch.syspath_prepend(tmp_path)
    assert play_once("edited_env:Env", texts=())[0] == [["old"]]
    (tmp_path / "edited_env.py").write_text(program.format("new, and longer"))
    assert play_once("edited_env:Env", texts=())[0] == [["new, and longer"]]


@pytest.mark.parametrize("fault", ["write", *slow("exit 3", "signal SIGKILL", "fork", "loop", "hang")])
def test_a_worker_that_was_lost_is_not_kept(play_once, kept, fault):
    _, first = play_once(process_envs.Obeys)
    [[*_, failure]], used = play_once(process_envs.Obeys, texts=("a", fault), step_timeout=1.0)
    assert used == first and isinstance(failure, EnvFailure)
    _, second = play_once(process_envs.Obeys)
    assert not second & first and not any(map(psutil.pid_exists, first))


def test_a_deadline_that_passes_as_its_call_returns_spares_the_next_user_of_the_worker(run_env, kept):
    env = run_env(process_envs.SPEC.factory, kept, placement="processes", num_workers=1)
    pid = env.reset().observation.info["pid"]
    [worker] = env.calls._workers._workers
    env.calls.end()
    worker.write_off(worker._call, "it was too slow")
    env = run_env(process_envs.SPEC.factory, kept, placement="processes", num_workers=1)
    assert env.reset().observation.info["pid"] == pid


@pytest.mark.slow
def test_a_worker_in_use_is_not_for_others(run_env, play_once, kept):
    env = run_env(process_envs.Obeys, kept, placement="processes", num_workers=1)
    env.reset()
    pid = env.step(Action("a")).info["pid"]
    assert pid not in play_once(process_envs.Obeys)[1]
    assert env.step(Action("a")).messages == "0: 2"


def test_a_worker_with_open_episodes_refuses_other_users(kept):
    process = WorkerProcess()
    process.load(refer_to(process_envs.SPEC))
    assert process.reuse() == ""
    process.carry_out(Reset(0, 0))
    assert "1 of its episodes are not closed" in process.reuse()
    process.end()


def test_a_worker_that_was_killed_while_nobody_used_it_is_replaced(play_once):
    _, first = play_once(process_envs.Obeys)
    psutil.Process(*first).kill()
    seen, second = play_once(process_envs.Obeys)
    assert seen == [["0 {}", "0: 1", "0: 2"]] and not second & first


@pytest.mark.slow
def test_the_worker_that_has_waited_longest_ends_where_they_are_too_many(play_once, kept):
    few = KeptWorkers(max_kept=2)
    pids = [play_once(process_envs.Obeys, arguments={"size": size}, kept=few)[1] for size in range(3)]
    assert [psutil.pid_exists(*each) for each in pids] == [False, True, True]
    few.close()
    assert not any(psutil.pid_exists(*each) for each in pids)
    assert not any(map(psutil.pid_exists, play_once(process_envs.Obeys, kept=few)[1]))


@pytest.mark.parametrize("text", ["a", *slow("thread")])
def test_a_worker_ends_itself_when_nobody_uses_it(play_once, monkeypatch, text):
    monkeypatch.setattr(worker_process, "_IDLE_SECONDS", 0.3)
    _, [first] = play_once(process_envs.Obeys, texts=("a", text))
    while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    assert play_once(process_envs.Obeys)[1] != {first}


@pytest.mark.slow
def test_a_worker_with_an_episode_waits_as_long_as_it_takes(run_env, kept, monkeypatch):
    monkeypatch.setattr(worker_process, "_IDLE_SECONDS", 0.1)
    env = run_env(process_envs.Obeys, kept, placement="processes", num_workers=1)
    env.reset()
    pid = env.step(Action("a")).info["pid"]
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(pid).wait(0.5)
    assert env.step(Action("a")).info["pid"] == pid


@pytest.mark.slow
def test_workers_end_with_the_object_that_keeps_them():
    kept, process = KeptWorkers(), WorkerProcess()
    process.load(refer_to(process_envs.SPEC))
    kept.give(b"", process)
    assert process.is_alive
    del kept
    gc.collect()
    assert not process.is_alive


def test_a_forked_child_leaves_its_parents_workers_alone():
    kept, process = KeptWorkers(), WorkerProcess()
    process.load(refer_to(process_envs.SPEC))
    kept.give(b"", process)

    def check():
        assert not process.is_sound
        with pytest.raises(WorkerLostError, match="belongs to process"):
            process.carry_out(Reuse())
        kept.close()

    in_fork(check)
    assert process.is_sound and not process.reuse()
    kept.close()
    assert not process.is_alive


PROGRAM = """
import os, signal, sys, threading
from rollout_engine.rollouts.episodes.env_calls import EnvCalls
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from tests.unit.rollouts.episodes import process_envs

kept, done = KeptWorkers(), threading.Event()
calls = EnvCalls(process_envs.SPEC, done.set, kept)
calls.reset(0, 7)
done.wait()
[(_, began)] = calls.take()
calls.end()
print(began.observation.info["pid"], flush=True)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        sys.exit()  # what the parent keeps is not its own
    os.waitpid(child, 0)
    calls = EnvCalls(process_envs.SPEC, done.set, kept)
    done.clear()
    calls.reset(0, 7)
    done.wait()
    [(_, again)] = calls.take()
    assert again.observation.info == began.observation.info
    calls.end()
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["fork", *slow("exit", "kill")])
def test_workers_end_with_the_interpreter(end):
    run = subprocess.run([sys.executable, "-c", PROGRAM, end], capture_output=True, text=True, timeout=120)
    assert not run.stderr and (run.returncode == 0) == (end != "kill")
    pid = int(run.stdout)
    if end == "kill" and psutil.pid_exists(pid):
        psutil.wait_procs([psutil.Process(pid)], timeout=60)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
