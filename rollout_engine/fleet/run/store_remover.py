"""Removes a directory once the parent process has ended: ``python -m rollout_engine.fleet.run.store_remover PATH``."""

import shutil
import sys


def main() -> None:
    """Wait for the end of standard input, which the parent holds open, and remove the directory."""
    sys.stdin.read()
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
