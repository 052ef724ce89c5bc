"""The fault runs at length: python -m tests.faults.soak [--seconds N] [PART ...], from the root of the repository.

Every part runs for about N seconds (or to its full count) and states how much that was. Its figures go to
results/MACHINE/DATE.json; a part that finds a fault raises, and nothing of it is written.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_engine import AsyncLLM
from rollout_engine.testing import tiny_checkpoint
from tests.benchmarks.results import save
from tests.faults.aborts import RandomAborts
from tests.faults.clean import Leftovers, assert_clean
from tests.faults.deaths import OPTIONS, TrainerDeaths, kill_core, kill_parent
from tests.faults.garbage import client_messages, mutants, throw_mutants
from tests.faults.peers import RawCore
from tests.faults.schedules import Schedule, make_menu
from tests.faults.updates import UpdatesUnderLoad

HERE = Path(__file__).parent
Figure = dict[str, Any]


def schedules(checkpoint: Path, seconds: float) -> Figure:
    """Random orders of every verb, several at once."""
    ends: Counter[str] = Counter()
    found = Counter(schedules=0, operations=0, refused_verbs=0, tokens=0)
    with _engine(checkpoint, num_kv_blocks=60, max_num_seqs=16) as engine:

        async def run() -> int:
            menu = await make_menu(engine)
            for seed in _until(seconds, 1000):
                schedule = Schedule(engine, menu, 1000 + seed)
                await schedule.run(seconds=5, max_operations=600)
                await assert_clean(engine)
                ends.update(schedule.ledger.counts)
                found["schedules"] += 1
                found["operations"] += schedule.num_operations
                found["refused_verbs"] += sum(schedule.refused.values())
                found["tokens"] += schedule.ledger.num_tokens
            return (await engine.get_metrics()).core.counters.num_preemptions

        preemptions = asyncio.run(run())
    wrong = dict(ended_twice_or_never=0, wrong_tokens=0, leaks=0)
    return dict(found) | dict(requests=sum(ends.values()), ends=dict(ends), preemptions=preemptions) | wrong


def updates(checkpoint: Path, seconds: float) -> Figure:
    """Good and bad weights while requests are added, aborted, paused and preempted."""
    with _engine(checkpoint, num_kv_blocks=24, max_num_seqs=16) as engine, tempfile.TemporaryDirectory() as directory:

        async def run() -> tuple[UpdatesUnderLoad, int]:
            load = UpdatesUnderLoad(engine, Path(directory), seed=11)
            await load.run(num_updates=1000, seconds=seconds)
            await assert_clean(engine)
            return load, (await engine.get_metrics()).core.counters.num_preemptions

        load, preemptions = asyncio.run(run())
    assert load.spelled.num_wrong == 0, vars(load.spelled)
    return dict(
        updates=load.num_updates,
        update_ms_median=round(1e3 * float(np.median(load.seconds)), 1),
        refused_attacks=dict(load.refused),
        requests=load.ledger.num_ended,
        ends=dict(load.ledger.counts),
        tokens=load.ledger.num_tokens,
        preemptions=preemptions,
        tokens_judged=load.spelled.num_right,
        tokens_over_old_kv_not_judged=load.spelled.num_over_old_kv,
        wrong_attributions=0,
        lost_or_repeated_tokens=0,
    )


def aborts(checkpoint: Path, seconds: float) -> Figure:
    """Requests aborted at random instants."""
    with _engine(checkpoint) as engine:
        run = RandomAborts(engine, seed=12)
        asyncio.run(run.run(num_aborts=100_000, seconds=seconds))
    return dict(aborts=run.num_aborts, ends=dict(run.ledger.counts), tokens=run.ledger.num_tokens, leaked_blocks=0)


def frames(checkpoint: Path, seconds: float) -> Figure:
    """Mutated messages to a live core."""
    sent = bad = connections = 0
    with _engine(checkpoint) as engine:
        pid = engine.remote.ready.pid
        for seed in _until(seconds, 50):
            found = throw_mutants(engine.address, count=20_000, seed=100 + seed)
            sent, bad = sent + found.num_sent, bad + found.num_bad
            connections += found.num_connections
        health = asyncio.run(_health(engine))
    assert (health.pid, health.io.num_rejected) == (pid, bad), f"{health} for {bad} bad frames of {sent}"
    return dict(frames=sent, bad_frames=bad, rejects_counted=bad, connections=connections, deaths=0)


def nonsense(_: Path, seconds: float) -> Figure:
    """Mutated messages to clients: each ends its client with an error, or is a message."""
    with tempfile.TemporaryDirectory() as directory:
        core, choose, found = RawCore(Path(directory)), random.Random(13), Counter[str]()
        for _ in _until(seconds, 5000):
            (told,) = mutants(client_messages(), 1, choose)
            error = core.tell([told])
            found["taken for a message" if "said all" in str(error) else "ended the client with an error"] += 1
        core.close()
    return dict(frames=sum(found.values()), outcomes=dict(found), hangs=0)


def cores(checkpoint: Path, seconds: float) -> Figure:
    """SIGKILL of a core at a random output, 64 callers waiting; and SIGSTOP."""
    leftovers, choose = Leftovers(), random.Random(14)
    killed: list[float] = []
    stopped: list[float] = []
    num_kills = num_stops = 0
    for i in _until(seconds, 1000):
        if i % 8 == 7:
            stopped += kill_core(checkpoint, choose.randint(1, 500), 64, signal.SIGSTOP, hang_seconds=1.0).seconds
            num_stops += 1
        else:
            killed += kill_core(checkpoint, choose.randint(1, 2000), 64, signal.SIGKILL, hang_seconds=5.0).seconds
            num_kills += 1
    leftovers.assert_none()
    return dict(
        kills=num_kills,
        callers_told=len(killed),
        told_after_ms=_quantiles(killed),
        stops=num_stops,
        stopped_callers_told=len(stopped),
        told_of_a_stop_after_ms=_quantiles(stopped) | dict(hang_seconds=1.0),
        never_told=0,
    )


def parents(checkpoint: Path, seconds: float) -> Figure:
    """SIGKILL of the process that owns a core."""
    gone = [kill_parent(checkpoint, signal.SIGKILL) for _ in _until(seconds, 1000)]
    return dict(kills=len(gone), core_gone_after_ms=_quantiles(gone), orphans=0)


def trainers(checkpoint: Path, seconds: float) -> Figure:
    """Trainers killed while they push to a live engine."""
    with _engine(checkpoint) as engine:

        async def run() -> TrainerDeaths:
            deaths = TrainerDeaths(engine, seed=15)
            await deaths.run(TRANSPORTS, num_deaths=1000, seconds=seconds)
            await assert_clean(engine)
            return deaths

        deaths = asyncio.run(run())
    assert deaths.spelled.num_wrong == 0, vars(deaths.spelled)
    return dict(
        deaths=deaths.num_deaths,
        transports=TRANSPORTS,
        pushes_begun=deaths.num_versions,
        next_update_taken_after_ms=_quantiles(deaths.recovery_seconds),
        tokens_judged=deaths.spelled.num_right,
        wrong_attributions=0,
    )


def publishers(_: Path, seconds: float) -> Figure:
    """Publishers of a store killed at random bytes and between system calls."""
    script = HERE.parent / "unit" / "sync" / "publisher_kills.py"
    total: Counter[str] = Counter()
    for seed in _until(seconds, 100):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, str(script), f"{directory}/store", "100", str(200 + seed)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        total.update(json.loads(done.stdout))
    assert total["torn"] == total["went_back"] == total["refused"] == 0, total
    return dict(total)


TRANSPORTS = ["shm", "store", "gloo"]
PARTS: dict[str, Callable[[Path, float], Figure]] = {
    part.__name__: part for part in (schedules, updates, aborts, frames, nonsense, cores, parents, trainers, publishers)
}


def _quantiles(seconds: list[float]) -> Figure:
    if not seconds:
        return {}
    return {f"p{q}": round(1e3 * float(np.quantile(seconds, q / 100)), 1) for q in (50, 99, 100)}


def _until(seconds: float, count: int) -> Iterator[int]:
    """0, 1, ... below `count`, while there is time."""
    deadline = time.monotonic() + seconds
    for i in range(count):
        yield i
        if time.monotonic() > deadline:
            return


@contextlib.contextmanager
def _engine(checkpoint: Path, **changes: int) -> Iterator[AsyncLLM]:
    """A live engine; its process, directory, descriptors and threads must be gone afterwards."""
    leftovers = Leftovers()
    with AsyncLLM(checkpoint, **(OPTIONS | dict(log_stats=False) | changes)) as engine:
        yield engine
    leftovers.assert_none(engine.address)


async def _health(engine: AsyncLLM) -> Any:
    await assert_clean(engine)
    return await engine.check_health()


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {' '.join(PARTS)}; default: all")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each part")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = tiny_checkpoint(directory)
        for name in options.parts or PARTS:
            start = time.perf_counter()
            figure = PARTS[name](checkpoint, options.seconds)
            figure["seconds"] = round(time.perf_counter() - start, 1)
            print(json.dumps({name: figure}), flush=True)
            command = f"python -m tests.faults.soak --seconds {options.seconds:g} {name}"
            save(options.results, name, figure, {}, command)


if __name__ == "__main__":
    main()
