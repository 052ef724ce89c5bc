"""A trainer that is killed at a write of its journal, and started again, has the rows of one that was not."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache

import pytest

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.batches.jsonl import samples
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.rollouts.journal.journal import JournalOptions
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint
from tests.integration.journal_child import OPTIONS, PARAMS, ROWS, reward

VERBS = ("collect", "update", "rollout")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def run(checkpoint):
    """Run a trainer in `work`, where it continues; returns its exit status."""
    command, environment = [sys.executable, "-m", "tests.integration.journal_child"], {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        starter = subprocess.Popen(command, text=True, env=os.environ | environment, **pipes)

        def start(work, verb, kill_at=0, engine=""):
            work.mkdir(exist_ok=True)
            given = {"model": checkpoint, "work": str(work), "verb": verb, "kill_at": kill_at, "engine": engine}
            print(json.dumps(given), file=starter.stdin, flush=True)
            status = starter.stdout.readline().strip()
            errors.seek(0)
            assert status in ("0", "-9"), errors.read()
            return int(status)

        yield start
        starter.stdin.close()
        starter.wait()
        starter.stdout.close()


def result(work):
    found = json.loads((work / "result.json").read_text())
    rows = {(row["group_id"], row["sample_index"], row.get("episode_id")): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]), "a row came twice"
    return rows, found["num_writes"], found["num_delivered"]


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    """A function of the verb: (rows, number of writes, groups delivered) of a run that was not killed."""

    @cache
    def play(verb):
        work = tmp_path_factory.mktemp(verb)
        assert run(work, verb) == 0
        return result(work)

    return play


def check(run, undisturbed, work, verb, kill_at, engine=""):
    expected, _, num_delivered = undisturbed(verb)
    assert run(work, verb, kill_at, engine) == -9
    assert run(work, verb, engine=engine) == 0
    rows, _, delivered = result(work)
    assert rows == expected and delivered == num_delivered


@pytest.mark.parametrize("verb", [pytest.param(each, marks=[pytest.mark.slow] * (each != "rollout")) for each in VERBS])
def test_rows_after_a_kill_are_those_of_an_undisturbed_run(run, undisturbed, tmp_path, verb):
    num_writes = undisturbed(verb)[1]
    for place in (0.35, 0.8):
        check(run, undisturbed, tmp_path / f"{place}", verb, 1 + int(place * num_writes))


@pytest.mark.slow
def test_the_writes_are_two_hundred(undisturbed):
    assert sum(undisturbed(verb)[1] for verb in VERBS) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_rows_are_the_same_whichever_write_is_the_last(run, undisturbed, tmp_path, verb):
    for kill_at in range(1, undisturbed(verb)[1] + 1):
        check(run, undisturbed, tmp_path / f"{kill_at}", verb, kill_at)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "fleet"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_trainer_with_engines_of_their_own_has_the_same_rows(run, undisturbed, tmp_path, verb, engine):
    for kill_at in (9, 22, 27):
        check(run, undisturbed, tmp_path / f"{kill_at}", verb, kill_at, engine)


@pytest.mark.slow
def test_a_trainer_whose_engine_is_killed_continues_with_another(checkpoint, undisturbed, tmp_path):
    expected, _, num_delivered = undisturbed("collect")
    found, num_dead = [], 0
    while True:
        with RolloutPolicy(AsyncLLM(checkpoint, **OPTIONS)) as policy:
            kept = JournalOptions(directory=str(tmp_path), progress_tokens=2)
            options = {"num_samples": 3, "groups_per_batch": 2, "seed": 5, "reward_fn": reward, "max_staleness": 2}
            collector = policy.collect(ROWS, PARAMS, journal=kept, **options)
            try:
                for batch in collector:
                    found += samples(batch)
                    os.kill(policy.frontend.client.pid, signal.SIGKILL)
            except EngineDeadError:
                num_dead += 1
                continue
            break
    rows = {(row["group_id"], row["sample_index"], row.get("episode_id")): row for row in found}
    assert len(rows) == len(found) and rows == expected
    assert num_dead > 1 and collector.stats.num_delivered == num_delivered
