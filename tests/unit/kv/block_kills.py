"""Kills processes that write, read, remove and evict blocks of one directory, and looks at what they leave.

python block_kills.py DIRECTORY NUM_KILLS SEED

Three forks at a time use the directory, each until its n-th call of the system, or byte written, at which it is killed
with SIGKILL. Every block's bytes follow from its key. Prints JSON: kills, wrong, faults, over, read, unfinished.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from rollout_engine.kv.block_directory import NoRoom
from rollout_engine.kv.block_frame import DamagedBlock
from rollout_engine.kv.block_listing import list_blocks
from tests.unit.kv.blocks import data, key, open_blocks, real_bytes

CALLS = (
    *("open", "close", "stat", "fstat", "unlink", "rename", "mkdir", "ftruncate"),
    *("pread", "preadv", "utime", "scandir", "listdir", "pwrite"),
)
NUM_AT_ONCE, NUM_KEYS, BLOCK, MAX_BYTES = 3, 24, 3000, 30_000
WRONG, FAULT, READ = 3, 4, 5


class Executioner:
    """Ends this process at a budget of calls, or of bytes."""

    def __init__(self, calls_left, bytes_left):
        self.calls_left, self.bytes_left = calls_left, bytes_left
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))
        fcntl.flock = self.counted(fcntl.flock)
        self._pwrite = os.pwrite
        os.pwrite = self.pwrite

    def counted(self, call):
        def then_maybe_die(*args, **kwargs):
            self.calls_left -= 1
            if self.calls_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return then_maybe_die

    def pwrite(self, file, content, start):
        if self.bytes_left < len(content):
            self._pwrite(file, content[: int(self.bytes_left)], start)
            os.kill(os.getpid(), signal.SIGKILL)
        self.bytes_left -= len(content)
        return self._pwrite(file, content, start)


def size_of(number):
    return BLOCK - 37 * number


def use(directory, seed, calls, num_bytes):
    """Use the directory until this process is killed; it ends with a status of its own if it finds a fault."""
    choice = random.Random(seed)
    Executioner(calls, num_bytes)
    blocks = open_blocks(directory, MAX_BYTES, is_mapped=seed % 2 == 0)
    while True:
        number = choice.randrange(NUM_KEYS)
        action = choice.random()
        if action < 0.6:
            write(blocks, number)
        elif action < 0.65:
            blocks.remove(key(number))
        elif read(blocks, number) is False:
            os._exit(WRONG)


def write(blocks, number):
    """Write a block. The others may take the room that an eviction has made, but not again and again."""
    for _ in range(20):
        with contextlib.suppress(NoRoom):
            return blocks.write(key(number), data(number, size_of(number)))
    raise AssertionError("no room")


def read(blocks, number):
    """Whether a block has its bytes; None if there is none. A damaged one is a fault: none is ever torn by a kill."""
    try:
        return blocks.read(key(number), time.time_ns()) == data(number, size_of(number))
    except FileNotFoundError:
        return None


def start(directory, seed, calls, num_bytes):
    child = os.fork()
    if child == 0:
        try:
            use(directory, seed, calls, num_bytes)
        except BaseException:
            traceback.print_exc()
        os._exit(FAULT)
    return child


def main(directory, num_kills, seed):
    choice = random.Random(seed)
    blocks = open_blocks(directory, MAX_BYTES)
    found = dict(kills=0, wrong=0, faults=0, over=0, read=0, unfinished=0)
    children = set()
    while found["kills"] + found["wrong"] + found["faults"] < num_kills:
        while len(children) < NUM_AT_ONCE:
            at_a_byte = choice.random() < 0.4
            num_bytes = choice.randrange(20 * BLOCK) if at_a_byte else float("inf")
            calls = float("inf") if at_a_byte else choice.randrange(600)
            children.add(start(directory, choice.randrange(1 << 30), calls, num_bytes))
        child, status = os.wait()
        children.discard(child)
        code = os.waitstatus_to_exitcode(status)
        found["kills" if code == -signal.SIGKILL else "wrong" if code == WRONG else "faults"] += 1
        for number in range(NUM_KEYS):
            try:
                outcome = read(blocks, number)
            except (DamagedBlock, OSError):
                found["faults"] += 1
                continue
            found["wrong"] += outcome is False
            found["read"] += outcome is True
        num_bytes, stated = real_bytes(blocks)
        found["over"] += num_bytes > min(stated, MAX_BYTES)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    blocks._count_again()
    num_bytes, stated = real_bytes(blocks)
    found["over"] += num_bytes != stated
    found["unfinished"] = sum(file.is_unfinished for file in list_blocks(blocks._root))
    found["faults"] += not (blocks.write(bytes(32), data(0)) and blocks.read(bytes(32), 5) == data(0))
    blocks.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
