"""Programs that use Ray: ``python -m tests.ray.scenarios CHECKPOINT NAME...``. Asserting is how one fails."""

import sys

import torch

from rollout_engine import EngineConfig
from tests.ray import (
    connections,
    fleet_deaths,
    fleet_nodes,
    fleets,
    kv_blocks,
    rank_nodes,
    replica_deaths,
    replica_starts,
)
from tests.ray.running import OPTIONS, SCENARIOS

MODULES = (connections, fleet_deaths, fleet_nodes, fleets, kv_blocks, rank_nodes, replica_deaths, replica_starts)
"""They fill `SCENARIOS`."""


def main():
    torch.set_num_threads(1)
    checkpoint, *names = sys.argv[1:]
    for name in names:
        print("begin", name, flush=True)
        SCENARIOS[name](EngineConfig(model=checkpoint, **OPTIONS))


if __name__ == "__main__":
    main()
