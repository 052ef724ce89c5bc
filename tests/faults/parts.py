"""The parts of the soak, each run by `tests.faults.soak` in a process of its own. A part that finds a fault raises."""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_engine import AsyncLLM, RPCError, SamplingParams
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.aborts import RandomAborts
from tests.faults.attacks import ATTACKS
from tests.faults.bystander import Bystander
from tests.faults.clean import Leftovers, assert_clean
from tests.faults.deaths import OPTIONS, TrainerDeaths, kill_core, kill_parent
from tests.faults.garbage import client_messages, mutants, restore, throw_mutants
from tests.faults.honest_load import honest_load
from tests.faults.peers import RawCore
from tests.faults.progress import be_watched, report, tell
from tests.faults.replica_deaths import PROMPTS, ReplicaDeaths, read
from tests.faults.schedules import Schedule, make_menu
from tests.faults.updates import UpdatesUnderLoad, spelling
from tests.fuzz import http_fuzz
from tests.simulation.run import BrainRun, FleetRun, Run
from tests.simulation.scheduler import Carriers

HERE = Path(__file__).parent
Figure = dict[str, Any]


def engines(checkpoint: Path, seconds: float, count: int) -> Figure:
    """One engine after the other, each used and ended: nothing that this process holds grows."""
    leftovers, held = Leftovers(), Counter[int]()
    for _ in _until(seconds, count):
        with AsyncLLM(checkpoint, **(OPTIONS | dict(log_stats=False))) as engine:
            asyncio.run(_use(engine))
        leftovers.assert_none(engine.address)
        held[len(os.listdir("/proc/self/fd"))] += 1
    return dict(engines=held.total(), descriptors_afterwards=sorted(held), leaks=0)


def clients(checkpoint: Path, seconds: float, count: int) -> Figure:
    """One client of a core after the other, as `engines`."""
    held = Counter[int]()
    with _engine(checkpoint) as engine:
        leftovers = Leftovers()
        for _ in _until(seconds, count):
            with AsyncLLM.connect(engine.address) as client:
                asyncio.run(_use(client))
            leftovers.assert_none()
            held[len(os.listdir("/proc/self/fd"))] += 1
    return dict(clients=held.total(), descriptors_afterwards=sorted(held), leaks=0)


def schedules(checkpoint: Path, seconds: float, count: int) -> Figure:
    """Random orders of every verb, several at once."""
    ends: Counter[str] = Counter()
    found = Counter(schedules=0, operations=0, refused_verbs=0, tokens=0)
    with _engine(checkpoint, num_kv_blocks=60, max_num_seqs=16) as engine:

        async def run() -> int:
            menu = await make_menu(engine)
            for seed in _until(seconds, count):
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


def simulations(_: Path, seconds: float, count: int) -> Figure:
    """Simulated engines: threads, clocks, failures and operations in the order that a seed decides."""
    return _simulated(Run, "", _until(seconds, count), math.inf)


def fleets(_: Path, seconds: float, count: int) -> Figure:
    """Simulated fleets until `count` faults have struck: a tenth of them whole ones, the others without threads."""
    whole = _simulated(FleetRun, "--fleet ", _until(seconds / 2, count), count // 10)
    events = _simulated(BrainRun, "--brain ", _until(seconds / 2, count), count - whole["num_faults"])
    return {"num_faults": whole["num_faults"] + events["num_faults"], "whole": whole, "without threads": events}


def _simulated(make: type[Run], option: str, seeds: Iterator[int], most_faults: float) -> Figure:
    ends, faults, num_runs, num_choices, start = Counter[str](), Counter[str](), 0, 0, time.process_time()
    with Carriers() as carriers:
        for seed in seeds:
            run = make(1_000_000 + seed).go(carriers)
            assert run.error is None, f"python -m tests.simulation {option}{run.seed}: {run.error}"
            num_runs, num_choices = num_runs + 1, num_choices + run.num_choices
            ends, faults = ends + run.ends, faults + run.faults
            if faults.total() >= most_faults:
                break
    found = dict(schedules=num_runs, choices=num_choices, ends=dict(ends), faults=dict(faults))
    found |= dict(num_faults=faults.total(), cpu_seconds=round(time.process_time() - start, 1))
    return found | dict(ended_twice_or_never=0, wrong_tokens=0, leaks=0, broken_promises=0)


def updates(checkpoint: Path, seconds: float, count: int) -> Figure:
    """Good and bad weights while requests are added, aborted, paused and preempted."""
    with _engine(checkpoint, num_kv_blocks=24, max_num_seqs=16) as engine, tempfile.TemporaryDirectory() as directory:

        async def run() -> tuple[UpdatesUnderLoad, int]:
            load = UpdatesUnderLoad(engine, Path(directory), seed=11)
            await load.run(num_updates=count, seconds=seconds)
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


def aborts(checkpoint: Path, seconds: float, count: int) -> Figure:
    """Requests aborted at random instants."""
    with _engine(checkpoint) as engine:
        run = RandomAborts(engine, seed=12)
        asyncio.run(run.run(num_aborts=count, seconds=seconds))
    return dict(aborts=run.num_aborts, ends=dict(run.ledger.counts), tokens=run.ledger.num_tokens, leaked_blocks=0)


def frames(checkpoint: Path, seconds: float, count: int) -> Figure:
    """Mutated messages to a live core."""
    sent = bad = connections = 0
    with _engine(checkpoint) as engine:
        pid = engine.frontend.client.pid
        for seed, size in enumerate(_pieces(seconds, count, 20_000)):
            found = throw_mutants(engine.address, count=size, seed=100 + seed)
            sent, bad = sent + found.num_sent, bad + found.num_bad
            connections += found.num_connections
        health = asyncio.run(_health(engine))
    assert (health.pid, health.io.num_rejected) == (pid, bad), f"{health} for {bad} bad frames of {sent}"
    return dict(frames=sent, bad_frames=bad, rejects_counted=bad, connections=connections, deaths=0)


def nonsense(_: Path, seconds: float, count: int) -> Figure:
    """Mutated messages to clients: each ends its client with an error, or is a message."""
    with tempfile.TemporaryDirectory() as directory:
        core, choose, found = RawCore(Path(directory)), random.Random(13), Counter[str]()
        for _ in _until(seconds, count):
            (told,) = mutants(client_messages(), 1, choose)
            error = core.tell([told])
            found["taken for a message" if "said all" in str(error) else "ended the client with an error"] += 1
        core.close()
    return dict(frames=sum(found.values()), outcomes=dict(found), hangs=0)


def cores(checkpoint: Path, seconds: float, count: int) -> Figure:
    """SIGKILL of a core at a random output, 64 callers waiting; and SIGSTOP."""
    leftovers, choose = Leftovers(), random.Random(14)
    killed: list[float] = []
    stopped: list[float] = []
    num_kills = num_stops = 0
    for i in _until(seconds, count):
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


def replicas(checkpoint: Path, seconds: float, count: int) -> Figure:
    """SIGKILL of a replica of two at a random output of 8 requests (15 samples); every tenth time SIGSTOP."""
    leftovers = Leftovers()
    with AsyncLLM(checkpoint, num_replicas=2, **(OPTIONS | dict(log_stats=False))) as engine:

        async def run() -> ReplicaDeaths:
            deaths = ReplicaDeaths(engine, seed=16)
            await engine.update_weights(tiny_model(seed=5).state_dict())
            expected = [await read(engine, i) for i in range(len(PROMPTS))]
            strikes = (signal.SIGSTOP if i % 10 == 9 else signal.SIGKILL for i in _until(seconds, count))
            await deaths.run(strikes, expected)
            return deaths

        deaths = asyncio.run(run())
    leftovers.assert_none()
    noticed = deaths.noticed_seconds
    return dict(
        kills=len(noticed["SIGKILL"]),
        stops=len(noticed["SIGSTOP"]),
        noticed_a_kill_after_ms=_quantiles(noticed["SIGKILL"]),
        noticed_a_stop_after_ms=_quantiles(noticed["SIGSTOP"]),
        caught_up_after_start_ms=_quantiles(deaths.caught_up_seconds),
        requests=deaths.num_requests,
        tokens=deaths.num_tokens,
        samples_continued_elsewhere=deaths.num_continued,
        lost=0,
        ended_twice=0,
        other_tokens_or_bits_than_undisturbed=0,
        leaks=0,
    )


def parents(checkpoint: Path, seconds: float, count: int) -> Figure:
    """SIGKILL of the process that owns a core."""
    gone = [kill_parent(checkpoint, signal.SIGKILL) for _ in _until(seconds, count)]
    return dict(kills=len(gone), core_gone_after_ms=_quantiles(gone), orphans=0)


def trainers(checkpoint: Path, seconds: float, count: int) -> Figure:
    """Trainers killed, and some stopped, while they push to a live engine."""
    with _engine(checkpoint) as engine:

        async def run() -> TrainerDeaths:
            deaths = TrainerDeaths(engine, seed=15, stopped=0.05)
            await deaths.run(TRANSPORTS, num_deaths=count, seconds=seconds)
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


def publishers(_: Path, seconds: float, count: int) -> Figure:
    """Publishers of a store killed at random bytes and between system calls."""
    script = HERE.parent / "unit" / "sync" / "publisher_kills.py"
    total: Counter[str] = Counter()
    for seed, size in enumerate(_pieces(seconds, count, 100)):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, str(script), f"{directory}/store", str(size), str(200 + seed)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        total.update(json.loads(done.stdout))
    assert total["torn"] == total["went_back"] == total["refused"] == 0, total
    return dict(total)


def attacks(checkpoint: Path, seconds: float, count: int) -> Figure:
    """Clients that mean no good, of every kind, beside one that streams and must not notice."""
    with _engine(checkpoint) as engine:

        async def run() -> Figure:
            bystander, found = Bystander(engine), {}
            await bystander.prepare()
            with bystander.apart():
                for name, (_, most) in ATTACKS.items():
                    await bystander.attacked(name, 1 + most // 100)  # what is allocated once is allocated now
                    found[name] = await bystander.attacked(name, min(most, count))
            return found | dict(bystanders_requests=bystander.num_requests, wrong_tokens=0)

        return asyncio.run(run())


def honest(_: Path, seconds: float, count: int) -> Figure:
    """The heaviest honest load, for `count` seconds: no watchdog may speak."""
    with tempfile.TemporaryDirectory() as directory:
        return honest_load(Path(directory), min(seconds, count))


TRANSPORTS = ["shm", "store", "gloo"]
PARTS: dict[str, tuple[Callable[[Path, float, int], Figure], int]] = {
    "engines": (engines, 200),
    "clients": (clients, 1000),
    "schedules": (schedules, 1000),
    "simulations": (simulations, 100_000),
    "fleets": (fleets, 100_000),
    "updates": (updates, 1000),
    "aborts": (aborts, 100_000),
    "honest": (honest, 600),
    "attacks": (attacks, 1_000_000),
    "http": (http_fuzz.soak, 100_000),
    "frames": (frames, 1_000_000),
    "nonsense": (nonsense, 5000),
    "cores": (cores, 1000),
    "replicas": (replicas, 100),
    "parents": (parents, 1000),
    "trainers": (trainers, 1000),
    "publishers": (publishers, 1000),
}
"""Name -> what it runs, and how many."""


def _quantiles(seconds: list[float]) -> Figure:
    if not seconds:
        return {}
    return {f"p{q}": round(1e3 * float(np.quantile(seconds, q / 100)), 1) for q in (50, 99, 100)}


def _until(seconds: float, count: int, size: int = 1) -> Iterator[int]:
    """0, 1, ... below `count`, while there is time. Each is reported as `size` things that were done."""
    deadline = time.monotonic() + seconds
    for i in range(count):
        report(i * size)
        yield i
        if time.monotonic() > deadline:
            return


def _pieces(seconds: float, count: int, size: int) -> Iterator[int]:
    """`count` in pieces of at most `size`, while there is time."""
    for done in _until(seconds, math.ceil(count / size), size):
        yield min(size, count - done * size)


@contextlib.contextmanager
def _engine(checkpoint: Path, **changes: int) -> Iterator[AsyncLLM]:
    """A live engine; its process, directory, descriptors and threads must be gone afterwards."""
    leftovers = Leftovers()
    with AsyncLLM(checkpoint, **(OPTIONS | dict(log_stats=False) | changes)) as engine:
        yield engine
    leftovers.assert_none(engine.address)


async def _use(engine: AsyncLLM) -> None:
    """Requests, new weights, and an array large enough to be sent without a copy; it is not what the method takes."""
    await engine.update_weights(spelling(engine.policy_version + 1))
    async for _ in engine.generate([5, 6], SamplingParams(max_tokens=20, ignore_eos=True)):
        pass
    with contextlib.suppress(RPCError):
        await engine.collective_rpc("get_weight_norms", args=[np.zeros(1 << 20, np.uint8)])
    await assert_clean(engine)


async def _health(engine: AsyncLLM) -> Any:
    await restore(engine)
    await assert_clean(engine)
    return await engine.check_health()


def main(name: str, seconds: str, count: str, directory: str, pipe: str) -> None:
    """Run one part, in the process that `tests.faults.watch` watches."""
    be_watched(int(pipe))
    torch.set_num_threads(1)
    checkpoint = tiny_checkpoint(Path(directory, "checkpoint"), max_position_embeddings=32_768)
    tell({"figure": PARTS[name][0](checkpoint, float(seconds), int(count))})


if __name__ == "__main__":
    main(*sys.argv[1:])
