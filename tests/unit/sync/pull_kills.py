"""Kills pulls between system calls and within writes, and reads the copies that they leave.

python pull_kills.py URL KEY DIRECTORY NUM_KILLS SEED

DIRECTORY/copy is a copy of an older version. Each kill has a fork pull into a copy of that until its n-th unit of work
(`publisher_kills.Executioner`); then the parent opens it, which compares all digests, and pulls again. Prints a JSON
object: how often a version was there after a kill, and after the pull that followed.
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from publisher_kills import Executioner  # noqa: E402

import sync  # noqa: E402


def main(url, key, directory, num_kills, seed):
    choice = random.Random(seed)
    torch.set_num_threads(1)
    found = {"killed": {}, "after": {}}
    for _ in range(num_kills):
        shutil.rmtree(directory / "work", ignore_errors=True)
        shutil.copytree(directory / "copy", directory / "work")
        child = os.fork()
        if child == 0:
            at_a_byte = choice.random() < 0.3
            num_bytes = choice.randrange(4000) if at_a_byte else float("inf")
            Executioner(float("inf") if at_a_byte else choice.randrange(400), num_bytes)
            sync.pull(url, directory / "work", key=key)
            os._exit(0)
        os.waitpid(child, 0)
        choice.random()  # the next child draws another place
        for state in ("killed", "after"):
            with sync.open_current(directory / "work") as published:
                version = str(published.version)
            found[state][version] = found[state].get(version, 0) + 1
            sync.pull(url, directory / "work", key=key)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
