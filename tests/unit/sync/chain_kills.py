"""Kills publishers of chains at random places, and compares every version that they leave with whole weights.

python chain_kills.py DIRECTORY NUM_CHAINS SEED

Each chain is a store with an interval of anchors. A fork publishes version after version until its n-th unit of work
(`publisher_kills.Executioner`) and is killed there; the parent reads the store, in process and by a receiver, and
compares all bits with those that were published, and the manifest with that of a whole push. Then another fork
continues. Prints a JSON object: chains, kills, links, wrong, refused, warnings.
"""

import json
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from chains import bytes_of, change_some, make_weights  # noqa: E402
from publisher_kills import Executioner  # noqa: E402

import sync  # noqa: E402
from sync.manifest import torch_dtype  # noqa: E402
from sync.offer import Offer  # noqa: E402
from sync.pointer import read_pointer  # noqa: E402

KILLS = 2
VERSIONS = 5


class Chain:
    """The versions of one store, made as they are asked for."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)
        self.anchor_every = int(self._random.integers(2, 6))
        self._versions = [make_weights(self._random)]

    def weights(self, version):
        while len(self._versions) < version:
            last = self._versions[-1]
            if self._random.random() < 0.08:
                self._versions.append(make_weights(self._random))  # other shapes
            else:
                self._versions.append(
                    change_some(self._random, last, float(self._random.choice([0, 0.001, 0.02, 0.9])))
                )
        return self._versions[version - 1]


def publish_until_killed(store, chain, version, calls, num_bytes):
    for coming in range(version, version + VERSIONS):
        chain.weights(coming)  # the parent has the same
    child = os.fork()
    if child == 0:
        Executioner(calls, num_bytes)
        for coming in range(version, version + VERSIONS):
            sync.publish(store, chain.weights(coming), coming, delta=True, anchor_every=chain.anchor_every)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def read_by_receiver(store, manifest):
    shadow = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in manifest.tensors}
    results = sync.make_receiver("store", directory=store).receive_into(shadow, manifest)
    assert all(results[spec.name].digest == spec.digest for spec in manifest.tensors)
    return shadow


def run_chain(store, seed, found):
    chain, choice, last = Chain(seed), np.random.default_rng(seed + 1), 0
    for _ in range(KILLS):
        at_a_byte = choice.random() < 0.5
        num_bytes = int(choice.integers(200_000)) if at_a_byte else float("inf")
        calls = float("inf") if at_a_byte else int(choice.integers(250))
        publish_until_killed(store, chain, last + 1, calls, num_bytes)
        found["kills"] += 1
        try:
            with sync.open_current(store) as published:
                wanted = chain.weights(published.version)
                shadow = read_by_receiver(store, published.manifest)
                whole = Offer(wanted, {}).manifest_in_place(published.version)
                is_right = bytes_of(published.tensors) == bytes_of(wanted) and published.version >= last
                is_right &= bytes_of(shadow).items() <= bytes_of(wanted).items()
                found["wrong"] += not (is_right and published.manifest == whole)
                found["links"] += len(read_pointer(store).before)
                last = published.version
        except sync.SyncError as problem:
            # Only a store in which nothing has been published yet may have nothing to read.
            if last or not re.search("is not a published store|does not exist", str(problem)):
                found["refused"].append(str(problem))


def main(directory, num_chains, seed):
    torch.set_num_threads(1)
    found = dict(chains=num_chains, kills=0, links=0, wrong=0, refused=[], warnings=0)

    class Counter(logging.Handler):
        def emit(self, record):
            found["warnings"] += 1

    logging.getLogger("sync").addHandler(Counter())
    for i in range(num_chains):
        store = directory / f"chain-{i}"
        run_chain(store, seed * 1_000_003 + 2 * i, found)
        shutil.rmtree(store, ignore_errors=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
