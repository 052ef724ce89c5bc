"""Processes that are killed or stopped: cores with callers waiting, parents of cores, trainers while they push."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rollout_engine import AsyncLLM, EngineConfig, EngineDeadError, LifecycleError, SamplingParams
from tests.faults.ledger import Ledger
from tests.faults.plan import FaultPlan
from tests.faults.progress import report
from tests.faults.updates import Spelled, spelling

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True)
ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False, output_kind="delta")
"""For a request that goes on until somebody ends it: a minute's work."""

PARENT = """
import asyncio, sys
from rollout_engine import AsyncLLM, SamplingParams

async def main():
    while True:
        async for _ in engine.generate([5, 6], SamplingParams(max_tokens=30_000, ignore_eos=True, output_kind="delta")):
            print(engine.frontend.client.pid, engine.address, flush=True)

engine = AsyncLLM(sys.argv[1], num_kv_blocks=2048, num_threads=1, skip_tokenizer_init=True)
asyncio.run(main())
"""

TRAINERS = """
import asyncio, contextlib, os, sys
import torch
torch.set_num_threads(1)
from rollout_engine import AsyncLLM, RolloutEngineError
from tests.faults.updates import spelling

async def push(engine, options):
    while True:
        version = (await engine.check_health()).policy_version + 1
        print("begin", version, flush=True)
        with contextlib.suppress(RolloutEngineError):  # on a busy machine the deadline may pass without a fault
            await engine.update_weights(spelling(version), version=version, timeout=3, **options)

for line in sys.stdin:
    address, transport = line.split()
    child = os.fork()
    if child == 0:
        engine = AsyncLLM.connect(address)
        asyncio.run(push(engine, {} if transport == "default" else {"transport": transport}))
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("dead", child, flush=True)
"""
"""Imports once; each line makes a fork that pushes version after version until it is killed."""


class Death(NamedTuple):
    """What callers saw of a core's death."""

    seconds: list[float]
    """From the signal to the error, for each caller."""
    message: str


def kill_core(checkpoint: Path, at_output: int, num_callers: int, number: int, hang_seconds: float) -> Death:
    """Start a core, strike it at the n-th output, and time what every caller sees."""
    config = EngineConfig(model=str(checkpoint), **OPTIONS)  # type: ignore[arg-type]
    with AsyncLLM.from_config(config, hang_seconds=hang_seconds) as engine:
        pid, address = engine.frontend.client.pid, engine.address
        struck: list[float] = []
        ends: list[float] = []

        def strike() -> None:
            struck.append(time.perf_counter())
            os.kill(pid, number)

        async def call(ledger: Ledger, i: int) -> None:
            entry = await ledger.run(engine, [5, 6 + i], ENDLESS, f"r{i}", lambda *_: None)
            ends.append(time.perf_counter())
            assert entry.ended == EngineDeadError.__name__, entry.ended

        async def run() -> None:
            plan = FaultPlan()
            plan.at("output", at_output, strike)
            ledger = Ledger(plan)
            await asyncio.gather(*(call(ledger, i) for i in range(num_callers)))
            ledger.assert_clean()

        asyncio.run(run())
        message = str(engine.dead_error)
    wait_gone(pid, address, 60)
    return Death([end - struck[0] for end in ends], message)


def kill_parent(checkpoint: Path, number: int) -> float:
    """Kill a process that owns a core; returns the seconds until core and directory are gone."""
    command = [sys.executable, "-c", PARENT, str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, address = parent.stdout.readline().split()
        start = time.perf_counter()
        parent.send_signal(number)
        parent.wait()
        wait_gone(int(pid), address, 60)
        return time.perf_counter() - start


def wait_gone(pid: int, address: str, seconds: float) -> None:
    """AssertionError unless process and directory are gone within `seconds`."""
    deadline = time.monotonic() + seconds
    while _lives(pid) or os.path.exists(address):
        assert time.monotonic() < deadline, f"core process lives: {_lives(pid)}, {address}"
        time.sleep(0.001)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # nobody may be there to reap an orphan
    except psutil.NoSuchProcess:
        return False


class TrainerDeaths:
    """Trainers in processes of their own push to a live engine and are killed at random instants, again and again.

    `stopped` is the share of those that are stopped first, and killed only when the next trainer's weights were taken.
    """

    def __init__(self, engine: AsyncLLM, seed: int, stopped: float = 0.0) -> None:
        self.engine, self.random, self._stopped = engine, random.Random(seed), stopped
        self.spelled, self.ledger = Spelled(), Ledger()
        self.num_deaths = self.num_versions = 0
        self.recovery_seconds: list[float] = []
        """From each signal to the next update that was taken."""

    async def run(self, transports: list[str], num_deaths: int, seconds: float) -> None:
        """Over each transport in turn, while requests run; ends with a whole update after every death."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:1] + [os.getcwd()])}
        trainers = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TRAINERS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        await self._update()
        readers = [asyncio.create_task(self._read(i)) for i in range(6)]
        deadline = time.monotonic() + seconds
        try:
            while self.num_deaths < num_deaths and time.monotonic() < deadline:
                await self._one(trainers, transports[self.num_deaths % len(transports)])
                self.num_deaths += 1
                report(self.num_deaths)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            assert trainers.stdin is not None
            trainers.stdin.close()
            await trainers.wait()
        failed = [reader.exception() for reader in readers if not reader.cancelled() and reader.exception()]
        assert not failed, failed

    async def _one(self, trainers: Any, transport: str) -> None:
        trainers.stdin.write(f"{self.engine.address} {transport}\n".encode())
        child, wanted, begun = 0, self.random.randint(1, 4), 0
        while begun < wanted or not child:
            word, _, number = (await trainers.stdout.readline()).decode().partition(" ")
            assert word, "the trainers have ended"
            child = int(number) if word == "child" else child
            begun += word == "begin"
        self.num_versions += begun
        await asyncio.sleep(self.random.choice([0, self.random.random() * 0.05]))
        is_stopped = self.random.random() < self._stopped
        os.kill(child, signal.SIGSTOP if is_stopped else signal.SIGKILL)
        struck = time.perf_counter()
        await self._update()
        self.recovery_seconds.append(time.perf_counter() - struck)
        if is_stopped:
            os.kill(child, signal.SIGKILL)
        while not (line := await trainers.stdout.readline()).startswith(b"dead"):
            assert line, "the trainers have ended"

    async def _update(self) -> None:
        """What the dead one had open is given up by itself; then the next trainer's weights are taken."""
        deadline = time.monotonic() + 60
        while True:
            version = (await self.engine.check_health()).policy_version + 1
            try:
                await self.engine.update_weights(spelling(version), version=version, timeout=60)
                return
            except LifecycleError as refusal:
                assert time.monotonic() < deadline, f"60 s after a trainer's death: {refusal}"
                await asyncio.sleep(0.005)

    async def _read(self, reader: int) -> None:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)
        count = 0
        while True:
            count += 1
            prompt = [self.random.randrange(3, 250) for _ in range(10)] + [4, 5]
            name = f"r{reader}-{count}"
            entry = await self.ledger.run(self.engine, prompt, params, name, lambda *_: None)
            assert entry.ended == "finished", entry.ended
            self.spelled.judge(entry.tokens[0], entry.spans[0])
