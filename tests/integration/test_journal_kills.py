"""A trainer that is killed at a write of its journal, and started again, has the rows of one that was not."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from rollout_engine.testing import tiny_checkpoint

VERBS = ("collect", "update", "rollout")
SLOW_POINTS = 67
"""Points of each verb in the slow test: 201 in all."""


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

        def start(work, verb, kill_at=0):
            work.mkdir(exist_ok=True)
            given = {"model": checkpoint, "work": str(work), "verb": verb, "kill_at": kill_at}
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
    """Verb -> (rows, number of writes, groups delivered) of a run that was not killed."""
    made = {}
    for verb in VERBS:
        work = tmp_path_factory.mktemp(verb)
        assert run(work, verb) == 0
        made[verb] = result(work)
    return made


def check(run, undisturbed, work, verb, kill_at):
    expected, _, num_delivered = undisturbed[verb]
    assert run(work, verb, kill_at) == -9
    assert run(work, verb) == 0
    rows, _, delivered = result(work)
    assert rows == expected and delivered == num_delivered


@pytest.mark.parametrize("verb", VERBS)
def test_rows_after_a_kill_are_those_of_an_undisturbed_run(run, undisturbed, tmp_path, verb):
    num_writes = undisturbed[verb][1]
    for place in (0.35, 0.8):
        check(run, undisturbed, tmp_path / f"{place}", verb, 1 + int(place * num_writes))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_rows_are_the_same_whichever_write_is_the_last(run, undisturbed, tmp_path, verb):
    num_writes = undisturbed[verb][1]
    for point in range(SLOW_POINTS):
        check(run, undisturbed, tmp_path / f"{point}", verb, 1 + point * num_writes // SLOW_POINTS)
