"""Simulated runs: python -m tests.simulation [--fleet | --brain] SEED [LIMIT] prints the log of one and its digest,
each time the same.

Where it fails, the log is that of the fewest choices of the same seed that still fail, which LIMIT repeats.
"""

import argparse

import torch

from tests.simulation.run import BrainRun, FleetRun, Run
from tests.simulation.scheduler import Carriers


def main() -> int:
    """Run what the command line says. Returns 1 where the run fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("limit", type=int, nargs="?", help="choices of the seed to follow; default: all")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--fleet", action="store_true", help="a fleet; default: one engine")
    kinds.add_argument("--brain", action="store_true", help="a fleet without threads, over simple cores")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make, what = (FleetRun, "--fleet ") if options.fleet else (BrainRun, "--brain ") if options.brain else (Run, "")
    with Carriers() as carriers:
        run: Run = make(options.seed, options.limit).go(carriers)
        shown = run if run.error is None or options.limit is not None else run.shortest(carriers)
    print("\n".join(shown.lines()))
    print(f"seed {run.seed}: {run.num_choices} choices, digest {run.digest()}")
    if shown is not run:
        print(
            f"the shortest failure: python -m tests.simulation {what}{run.seed} {shown.limit}, digest {shown.digest()}"
        )
    return int(run.error is not None)


if __name__ == "__main__":
    raise SystemExit(main())
