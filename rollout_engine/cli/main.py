"""Parses and runs a command. Its module is imported only when it is chosen, so `--help` loads nothing heavy."""

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rollout_engine import __version__
from rollout_engine.base.errors import RolloutEngineError, unknown_name

PROGRAM = "rollout-engine"
COMMANDS = {
    "doctor": "what this machine can do: processor, kernels, row plans, transports, extras, versions",
    "generate": "print completions of prompts",
    "rollout": "write rollouts as JSON lines: tokens, log-probs, policy versions, seeds",
    "eval": "tasks x sampling settings x checkpoints: pass@k, maj@k, intervals, and a report",
    "replay": "logged rollouts made again bit by bit, or where they differ and why",
    "view": "a page of rollouts to look at: filter, sort, open, colour tokens, compare",
    "watch": "a run that goes on: rewards, lengths, entropy, KL, staleness, stalls, tokens per second",
    "postmortem": "the last steps of a core that died, and whether its scheduler fails alone",
    "serve": "an HTTP server for clients that speak OpenAI's, vLLM's or SGLang's dialect",
    "core": "a core that listens on TCP, for front ends on other machines",
    "shard": "a directory from which each rank of an engine loads its own part of a model",
    "bench": "tokens per second of a model, and the share of what memory and arithmetic allow",
    "tune": "threads, budgets and speculation for a model on this machine, by measuring, as a TOML file",
    "simulate": "throughput, latency, staleness and failures of a fleet of thousands, from what its steps cost",
}
"""Name -> help. A command is a module `rollout_engine.cli.<name>` with `add_arguments(parser)` and `run(arguments)`."""


def load_command(name: str) -> Any:
    """The module of a command, with `add_arguments(parser)` and `run(arguments)`."""
    return importlib.import_module(f"rollout_engine.cli.{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or print the help without any.

    Returns the exit status: 0 or the command's own status, 2 for an error that the user can correct, 130 when
    interrupted, 141 if the rest of its output is not read (`... | head`).
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen, rest = _choose(given or ["--help"])
    command = load_command(chosen)
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {chosen}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    try:
        status: int | None = command.run(parser.parse_intermixed_args(rest))
        sys.stdout.flush()
    except BrokenPipeError:
        if _is_read(sys.stdout):
            raise
        return 141
    except RolloutEngineError as problem:
        print(f"{PROGRAM} {chosen}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM} {chosen}: interrupted", file=sys.stderr)
        return 130
    return status or 0


def _is_read(output: TextIO) -> bool:
    """Whether the other end of a pipe is still there. If not, discard all further output."""
    poll = select.poll()
    poll.register(output.fileno(), 0)  # errors alone
    if not poll.poll(0):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    return False


def _choose(arguments: list[str]) -> tuple[str, list[str]]:
    """Split the command from its arguments."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s COMMAND [--help] ...",
        description="Makes rollouts for reinforcement learning on language models.",
        epilog="commands:\n" + "\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.command not in COMMANDS:
        parser.error(unknown_name("command", parsed.command, COMMANDS))
    return parsed.command, parsed.rest
