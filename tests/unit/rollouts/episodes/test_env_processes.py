"""Environments in worker processes: results, random states, deaths, and what is left."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from envs_adapters.base import Action, Observation, ToolCall
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import Began, EnvFailure
from rollout_engine.rollouts.episodes.random_state import RandomState
from tests.unit.rollouts.episodes import process_envs

ROOT = Path(__file__).parents[4]


@pytest.fixture
def run_processes(run_env):
    """Run environments of `process_envs` in worker processes, of which none may be left."""
    before = set(psutil.Process().children(recursive=True))

    def run(factory, num_workers=1, **options):
        return run_env(factory, placement="processes", num_workers=num_workers, **options)

    yield run
    run_env.end()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_episodes_are_reset_and_stepped(run_processes):
    env = run_processes(process_envs.Obeys, arguments={"size": 3})
    assert env.reset(4, seed=2) == Began(Observation("2 {'size': 3}", {}), [], 1)
    observation = env.step(Action("a"), 4)
    assert (observation.messages, observation.reward) == ("2: 1", {0: 0.0})
    assert observation.info["pid"] != os.getpid() and not observation.info["torch"]


def test_members_of_a_group_see_the_same_episode_and_the_callers_generators_are_untouched(run_processes):
    random.seed(5)
    np.random.seed(5)
    untouched = random.getstate(), np.random.get_state()[1].tolist()
    env = run_processes(process_envs.DrawsUnseeded, num_workers=2)
    seeds = [0, 0, 1, 0, 1, 0]
    for key, seed in enumerate(seeds):
        env.calls.reset(key, seed)
    seen = {key: [began.observation.messages] for key, began in env.results(6)}
    for _ in range(3):
        for key in seen:
            env.calls.step(key, Action("a"))
        for key, observation in env.results(6):
            seen[key].append(observation.messages)
    assert seen[0] == seen[1] == seen[3] == seen[5] and seen[2] == seen[4] and seen[0] != seen[2]
    assert len(set(seen[0])) == 4
    assert (random.getstate(), np.random.get_state()[1].tolist()) == untouched


def test_a_random_state_goes_on_where_it_was_left():
    ours, other = RandomState(3), RandomState(3)
    with ours:
        first = [random.random(), np.random.rand()]
    with other:
        assert [random.random(), np.random.rand()] == first
        random.seed(99)
    with ours:
        second = [random.random(), np.random.rand()]
    random.seed(3)
    assert [random.random(), random.random()] == [first[0], second[0]]


FAULTS = [
    ("exit 3", "its worker process exited with status 3"),
    ("signal SIGKILL", "its worker process was killed by SIGKILL"),
    ("signal SIGSEGV", "its worker process was killed by SIGSEGV"),
    ("fork", "its worker process exited with status 5"),
    ("write", "its worker process broke its connection"),
    ("hang", "did not return within 1 seconds"),
    ("loop", "did not return within 1 seconds"),
]
ALIKE = "signal SIGSEGV", "fork", "loop"
"""Those that are told like another one."""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "text, reason", [pytest.param(*fault, marks=[pytest.mark.slow] * (fault[0] in ALIKE)) for fault in FAULTS]
)
def test_a_worker_that_dies_costs_only_the_episode_whose_call_it_was(run_processes, text, reason):
    env = run_processes(process_envs.Obeys, step_timeout=1.0)
    for key in range(3):
        env.reset(key, seed=key)
        pid = env.step(Action("a"), key).info["pid"]
    failure = env.step(Action(text), 1)
    assert isinstance(failure, EnvFailure) and reason in failure.reason and failure.reason.startswith("Obeys: step")
    for key in (0, 2):
        observation = env.step(Action("a"), key)
        assert observation.messages == f"{key}: 2" and observation.info["pid"] != pid
    assert "the episode is lost" in env.step(Action("a"), 1).reason
    env.calls.close(1)
    assert isinstance(env.reset(1), Began)


@pytest.mark.quick(1)
@pytest.mark.parametrize("how, status", [("return", 1), ("raise", 1), ("exit", 3)])
def test_a_forked_child_that_leaves_step_ends_and_answers_for_no_episode(run_processes, how, status, capfd):
    env = run_processes(process_envs.Obeys, num_workers=2)
    for key in range(6):
        env.reset(key, seed=key)
    for turn in range(1, 4):
        for key in range(6):
            env.calls.step(key, Action(f"twice {how}" if (key + turn) % 2 else "a"))
        for key, observation in env.results(6):
            assert (observation.messages, observation.reward) == (f"{key}: {turn}", {0: 0.0})
            assert observation.info.get("status", status) == status
    said = "returned from it" if how == "return" else "left it by ValueError"
    printed = capfd.readouterr().err
    assert printed.count(f"Obeys: step: a child process that it forked {said}") == (0 if how == "exit" else 9)


def test_a_reply_to_another_call_costs_the_episode_and_its_worker(run_processes):
    env = run_processes(process_envs.Obeys)
    for key in range(2):
        env.reset(key, seed=key)  # orders 2 and 3: the first one loads the factory
    failure = env.step(Action("forge 2"), 0)
    assert isinstance(failure, EnvFailure) and "its worker process broke its connection" in failure.reason
    assert env.step(Action("a"), 1).messages == "1: 1"


def test_a_worker_killed_between_calls_is_noticed_by_nobody(run_processes):
    env = run_processes(process_envs.DrawsUnseeded)
    env.reset(0, 7)
    env.reset(1, 7)
    first = [env.step(Action("a"), 0) for _ in range(3)]
    os.kill(first[0].info["pid"], signal.SIGKILL)
    second = [env.step(Action("a"), 1) for _ in range(3)]
    assert [each.messages for each in first] == [each.messages for each in second]
    assert first[0].info["pid"] != second[0].info["pid"]
    assert env.step(Action("a"), 0).messages == env.step(Action("a"), 1).messages


def test_an_environment_that_its_seed_does_not_determine_cannot_be_replaced(run_processes):
    env = run_processes(process_envs.Obeys)
    for key in range(2):
        env.reset(key)
        pid = env.step(Action("a"), key).info["pid"]
    env.step(Action("time"), 1)
    os.kill(pid, signal.SIGKILL)
    failure = env.step(Action("a"), 1)
    assert "another one from its step 2 on" in failure.reason and "not determined by its seed" in failure.reason
    assert env.step(Action("a"), 0).messages == "0: 2"


REFUSED = [
    ("raise no", "Obeys: step raised ValueError: no"),
    ("sysexit 3", "Obeys: step raised SystemExit: 3"),
    ("nan", "reward=nan is not allowed"),
    ("none", "not NoneType"),
    ("text 10000000", "10000000 bytes of text"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("text, reason", REFUSED)
def test_what_an_environment_does_wrong_is_told_and_its_worker_goes_on(run_processes, text, reason):
    env = run_processes(process_envs.Obeys)
    env.reset()
    pid = env.step(Action("a")).info["pid"]
    assert reason in env.step(Action(text)).reason
    assert env.step(Action("a")).info["pid"] == pid


def test_output_of_environments_does_not_disturb_and_info_becomes_plain(run_processes, capfd):
    env = run_processes(process_envs.Obeys)
    env.reset()
    assert env.step(Action("print hello")).messages == "printed"
    assert capfd.readouterr().out == "hello\nraw\n"
    assert env.step(Action("child")).messages == "hi\n"
    info = env.step(Action("info")).info
    deep = env.step(Action("deep")).info["deep"]
    while isinstance(deep, list):
        [deep] = deep
    assert deep.startswith("<list: maximum recursion depth exceeded")
    assert info["array"] == [0, 1, 2] and info["object"].startswith("<unlocked") and info["big"] == str(1 << 80)


@pytest.mark.slow
def test_async_environments_and_tools_run_in_processes(run_processes):
    env = run_processes(process_envs.Waits)
    env.reset()
    assert env.step(Action("")).messages == "b"
    env = run_processes(process_envs.Multiplies)
    assert env.reset().tools[0]["function"]["name"] == "multiply"
    calls = [ToolCall("multiply", {"a": 3, "b": 4}), ToolCall("multiply", {"a": 1 << 70, "b": "\ud800"})]
    messages = env.step(Action("", tool_calls=calls)).messages
    assert messages[0] == {"role": "tool", "name": "multiply", "content": "12"}
    assert messages[1]["content"].startswith("Error: multiply: ")


class Local(process_envs.Obeys):
    """A class that cannot be found is one in a function."""


def _local():
    class Inside(Local):
        pass

    return Inside


@pytest.mark.parametrize(
    "factory, arguments, reason",
    [
        (lambda: None, {}, "top level of a module"),
        (_local(), {}, "top level of a module"),
        (process_envs.Obeys, {"file": threading.Lock()}, "file cannot be sent to worker processes"),
        (process_envs.Obeys, {"pair": (1, 2)}, r"pair=\(1, 2\) would arrive"),
    ],
)
def test_what_another_process_cannot_have_is_refused(run_processes, factory, arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        run_processes(factory, arguments=arguments)


def test_a_factory_that_cannot_be_imported_is_told_at_each_reset(run_processes):
    env = run_processes("no_such_module:Env")
    for key in range(2):
        assert "No module named 'no_such_module'" in env.reset(key).reason


PROGRAM = """
import os, sys, threading
from envs_adapters import Action, EnvSpec, Observation
from rollout_engine.rollouts.episodes.env_calls import EnvCalls

class Mine:
    def reset(self, seed):
        return str(seed)
    def step(self, action):
        return Observation(str(os.getpid()))

def main():
    done = threading.Event()
    calls = EnvCalls(EnvSpec(Mine, placement="processes", num_workers=1, step_timeout=5.0), done.set)
    calls.reset(0, 7)
    done.wait()
    print(calls.take()[0][1].observation.messages, flush=True)
    done.clear()
    calls.step(0, Action(""))
    done.wait()
    print(calls.take()[0][1].messages, flush=True)
    if sys.argv[1:]:
        done.clear()
        done.wait()
    calls.end()

GUARD
    main()
"""


def _program(tmp_path, guard='if __name__ == "__main__":'):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("GUARD", guard))
    return [sys.executable, str(path)], os.environ | {"PYTHONPATH": str(ROOT)}


def test_an_environment_of_the_program_itself_is_found_in_its_file(tmp_path):
    command, environment = _program(tmp_path)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.startswith("7\n") and not run.stderr


def test_a_program_without_a_guard_is_told_to_have_one(tmp_path):
    command, environment = _program(tmp_path, "if True:")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "'EnvFailure' object has no attribute" in run.stderr and run.returncode == 1


def test_a_worker_whose_parent_is_killed_ends(tmp_path):
    command, environment = _program(tmp_path)
    with subprocess.Popen([*command, "wait"], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "7\n"
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


OWNER = """
import os, sys, threading
from pathlib import Path
from envs_adapters import Action, EnvSpec
from rollout_engine.rollouts.episodes.env_calls import EnvCalls
from tests.unit.rollouts.episodes import process_envs

done, results = threading.Event(), []
calls = EnvCalls(EnvSpec(process_envs.Obeys, placement="processes", num_workers=1), done.set)
for call in (lambda: calls.reset(0, 7), lambda: calls.step(0, Action("a"))):
    done.clear()
    call()
    done.wait()
    [(_, result)] = calls.take()
calls.step(0, Action(sys.argv[1]))
print(result.info["pid"], flush=True)
sys.stdin.read()
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("state", ["stopped", "in C", "with a child"])
def test_a_worker_whose_owner_is_killed_ends_in_whatever_state_it_is(tmp_path, state):
    begun = tmp_path / "begun"
    action = {"stopped": "a", "in C": f"regex {begun}", "with a child": f"leave {begun}"}[state]
    command, environment = [sys.executable, "-c", OWNER, action], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        worker = psutil.Process(int(owner.stdout.readline()))
        if state == "stopped":
            worker.suspend()
        while state != "stopped" and not (begun.exists() and (state == "in C" or begun.read_text())):
            time.sleep(0.01)
        left = [worker, *worker.children()]
        assert len(left) == 1 + (state == "with a child")
        owner.kill()
    try:
        assert not psutil.wait_procs(left, timeout=60)[1]
    finally:
        for process in left:
            if process.is_running():
                process.kill()


@pytest.mark.slow
def test_what_a_hanging_environment_has_started_ends_with_its_worker(run_processes, tmp_path):
    env = run_processes(process_envs.Obeys, step_timeout=2.0)
    env.reset()
    failure = env.step(Action(f"leave {tmp_path / 'child'}"))
    assert "did not return within 2 seconds" in failure.reason
    child = int((tmp_path / "child").read_text())
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=60)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_workers_load_no_torch():
    code = (
        "import sys, rollout_engine.rollouts.episodes.env_worker\nprint({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout == "set()\n"


def test_end_kills_what_hangs(run_processes, tmp_path):
    env = run_processes(process_envs.Obeys, step_timeout=2.0)
    env.reset()
    pid = env.step(Action("a")).info["pid"]
    begun = tmp_path / "begun"
    env.calls.step(0, Action(f"hang {begun}"))
    while not begun.exists():
        time.sleep(0.01)
    env.calls.end()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("step_timeout", [0.001, 0.05, 0.2])
def test_end_leaves_no_worker_that_was_about_to_start(run_processes, tmp_path, monkeypatch, step_timeout):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    env = run_processes("slow_to_import:Env", step_timeout=step_timeout)
    env.calls.reset(0, 0)
    env.calls.end()
