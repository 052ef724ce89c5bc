"""Environments for worker processes, which import this module; it imports nothing heavy."""

import asyncio
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from envs_adapters.base import EnvSpec, Observation
from rollout_engine.rollouts.episodes.env_wire import Reply, encode_reply


class Draws:
    """Draws from the global generators; tells what it drew."""

    def reset(self, seed):
        random.seed(seed + 1)  # as some packages do
        np.random.seed(seed)
        return self._draw()

    def step(self, action):
        return Observation(self._draw(), 1.0, info={"pid": os.getpid(), "text": action.text})

    def _draw(self):
        return f"{random.random()} {np.random.rand()} {random.choice(list({'a', 'b', 'c', 'd'}))}"


class DrawsUnseeded(Draws):
    """Leaves the seeds alone."""

    def reset(self, seed):
        return self._draw()


class ImportsTorch(DrawsUnseeded):
    """Imports torch when it is first needed, and draws from its generator."""

    def _draw(self):
        import torch

        return f"{torch.rand(()).item()} {random.random()}"


class TellsItsProcess(DrawsUnseeded):
    """Tells at once where it is; one step is all."""

    def reset(self, seed):
        return Observation(self._draw(), info={"pid": os.getpid()})

    def step(self, action):
        return Observation(terminated=True, info={"pid": os.getpid()})


SPEC = EnvSpec(TellsItsProcess, name="TellsItsProcess", placement="processes", num_workers=1)


class Obeys:
    """Does what the action says, and counts."""

    num_open = 0
    """Environments whose `close` was not called."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.count = 0
        Obeys.num_open += 1

    def close(self):
        Obeys.num_open -= 1

    def reset(self, seed):
        self.seed = seed
        return f"{seed} {self.arguments}"

    def step(self, action):
        self.count += 1
        name, _, argument = action.text.partition(" ")
        if hasattr(self, f"do_{name}"):
            return getattr(self, f"do_{name}")(argument)
        return Observation(f"{self.seed}: {self.count}", info={"pid": os.getpid(), "torch": "torch" in sys.modules})

    def do_exit(self, status):
        os._exit(int(status))

    def do_sysexit(self, status):
        sys.exit(int(status))

    def do_signal(self, name):
        os.kill(os.getpid(), getattr(signal, name))

    def do_raise(self, text):
        raise ValueError(text)

    def do_hang(self, path):
        if path:
            Path(path).touch()
        time.sleep(1000)

    def do_regex(self, path):
        """Compute in C, without giving the interpreter to another thread."""
        Path(path).touch()
        re.match("(a+)+$", "a" * 100 + "b")

    def do_leave(self, path):
        """Start a process that keeps running, and hang."""
        child = subprocess.Popen(["sleep", "1000"])
        Path(path).write_text(str(child.pid))
        time.sleep(1000)

    def do_thread(self, _):
        """Leave a thread behind that ends with the process only."""
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return Observation("started")

    def do_loop(self, _):
        while True:
            pass

    def do_print(self, text):
        print(text, flush=True)
        os.write(1, b"raw\n")
        print(text, file=sys.stderr, flush=True)
        sys.stdin.read()
        return Observation("printed")

    def do_fork(self, _):
        """Leave a process behind that holds all that this one has."""
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os._exit(5)

    def do_twice(self, how):
        """Fork; both processes leave `step`, the child as `how` says."""
        child = os.fork()
        if child == 0:
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise ValueError("in the child")
            return Observation("from the child", reward=100.0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Observation(f"{self.seed}: {self.count}", info={"status": status})

    def do_forge(self, number):
        """Write a reply to order `number` into the connection, in front of the worker's own."""
        forged = encode_reply(Reply(observation=Observation("forged", {0: 100.0})), int(number))
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, len(forged).to_bytes(8, "little") + forged)
        return Observation("genuine")

    def do_write(self, _):
        """Write to every descriptor, that of the connection among them."""
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if descriptor > 2:
                    os.write(descriptor, b"garbage, and more of it")
            except OSError:
                pass
        return Observation("written")

    def do_child(self, _):
        return Observation(subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout)

    def do_info(self, _):
        return Observation("", info={"array": np.arange(3), "object": threading.Lock(), "big": 1 << 80})

    def do_deep(self, _):
        deep = []
        for _ in range(100_000):
            deep = [deep]
        return Observation("", info={"deep": deep})

    def do_nan(self, _):
        return Observation("", reward=float("nan"))

    def do_none(self, _):
        return None

    def do_wrong(self, _):
        return Observation(5)

    def do_late(self, _):
        time.sleep(1.5)
        return Observation("late")

    def do_text(self, number):
        return Observation("x" * int(number))

    def do_time(self, _):
        return Observation(str(time.time_ns()))


class Waits:
    """Awaits."""

    async def reset(self, seed):
        await asyncio.sleep(0.001)
        return "a"

    async def step(self, action):
        await asyncio.sleep(0.001)
        return Observation("b")


class Multiplies:
    """Has a function as a tool."""

    @property
    def tools(self):
        return [self.multiply]

    def multiply(self, a: int, b: int) -> int:
        """Multiplies.

        Args:
            a: a number
            b: a number
        """
        return a * b

    def reset(self, seed):
        return "a"

    def step(self, action):
        return Observation("b")
