"""Simulated runs: python -m tests.simulation SEED [LIMIT] prints the log of one and its digest, the same each time.

Where it fails, the log is that of the fewest choices of the same seed that still fail, which LIMIT repeats.
"""

import argparse

from tests.simulation.run import Run
from tests.simulation.scheduler import Carriers


def main() -> int:
    """Run what the command line says. Returns 1 where the run fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("limit", type=int, nargs="?", help="choices of the seed to follow; default: all")
    options = parser.parse_args()
    with Carriers() as carriers:
        run = Run(options.seed, options.limit).go(carriers)
        shown = run if run.error is None or options.limit is not None else run.shortest(carriers)
    print("\n".join(shown.lines()))
    print(f"seed {run.seed}: {run.num_choices} choices, digest {run.digest()}")
    if shown is not run:
        print(f"the shortest failure: python -m tests.simulation {run.seed} {shown.limit}, digest {shown.digest()}")
    return int(run.error is not None)


if __name__ == "__main__":
    raise SystemExit(main())
