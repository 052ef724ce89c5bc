"""Kills publishers at random bytes and between system calls, and reads what they leave.

python publisher_kills.py DIRECTORY NUM_KILLS SEED

Each publisher is a fork that publishes version after version until its n-th unit of work, where a byte written and a
system call each count as work; then it is killed with SIGKILL in the middle of that write or call. The parent opens the
store after each kill. Every element of version v is v. Prints a JSON object: kills, torn, went_back, refused, versions.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

import sync
from sync.errors import SyncError

SHAPES = {"embed": (300, 40), "norm": (40,), "head": (40, 300), "tiny": (), "layer.weight": (64, 64)}
CALLS = ("open", "close", "fsync", "rename", "replace", "unlink", "mkdir", "ftruncate", "posix_fallocate", "listdir")


class Executioner:
    """Wraps the file calls of `os`; ends this process at a budget of calls, or of bytes."""

    def __init__(self, calls_left: float, bytes_left: float) -> None:
        self.calls_left, self.bytes_left = calls_left, bytes_left
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))
        self._pwrite = os.pwrite
        os.pwrite = self.pwrite

    def counted(self, call):
        def then_maybe_die(*args, **kwargs):
            self.calls_left -= 1
            if self.calls_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return then_maybe_die

    def pwrite(self, file, content, offset):
        if self.bytes_left < len(content):
            self._pwrite(file, content[: int(self.bytes_left)], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        self.bytes_left -= len(content)
        return self._pwrite(file, content, offset)


def weights(version):
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


def publish_until_killed(store, version, calls, num_bytes):
    child = os.fork()
    if child == 0:
        Executioner(calls, num_bytes)
        while True:
            sync.publish(store, weights(version), version)
            version += 1
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(store, num_kills, seed):
    choice = random.Random(seed)
    torch.set_num_threads(1)
    bytes_of_a_version = sum(4 * tensor.numel() for tensor in weights(0).values())
    found = dict(kills=num_kills, torn=0, went_back=0, refused=0, versions=0)
    last = 0
    for _ in range(num_kills):
        at_a_byte = choice.random() < 0.5
        num_bytes = choice.randrange(3 * bytes_of_a_version) if at_a_byte else float("inf")
        calls = float("inf") if at_a_byte else choice.randrange(150)
        publish_until_killed(store, last + 1, calls, num_bytes)
        try:
            with sync.open_current(store) as published:
                values = {float(value) for t in published.tensors.values() for value in (t.min(), t.max())}
                found["torn"] += values != {float(published.version)}
                found["went_back"] += published.version < last
                last = max(last, published.version)
        except SyncError as problem:
            # Only a store in which nothing has been published yet may have nothing to read.
            found["refused"] += last > 0 or "is not a published store" not in str(problem)
    found["versions"] = last
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
