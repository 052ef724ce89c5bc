"""Prints the last steps of a core that died, from the file that its EngineDeadError names.

rollout-engine postmortem FILE
rollout-engine postmortem FILE --replay     without a model: does the scheduler alone fail?
rollout-engine postmortem FILE.stacks       of a core whose native code crashed: where its threads were
"""

import argparse
import time
from pathlib import Path

from rollout_engine.base.errors import RequestError
from rollout_engine.cli.schedule_replay import replay
from rollout_engine.process.post_mortem import (
    STACKS_SUFFIX,
    AddLine,
    CallLine,
    EndLine,
    Header,
    Line,
    LiveLine,
    StepLine,
    read_post_mortem,
    read_stacks,
)

_NUM_NAMED = 8
"""Sequences that are named in a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `postmortem`."""
    parser.add_argument("file", type=Path, help="the file, named *.jsonl or *.stacks")
    parser.add_argument("--last", type=int, default=20, metavar="N", help="lines to print, the last ones (default 20)")
    parser.add_argument("--replay", action="store_true", help="replay the schedule without a model")


def run(arguments: argparse.Namespace) -> None:
    """Print the header and the last lines, or replay all of them; of a crash print the stacks."""
    if arguments.file.suffix == STACKS_SUFFIX:
        _print_stacks(arguments.file, replays=arguments.replay)
        return
    lines = read_post_mortem(arguments.file)
    header, *rest = lines
    assert isinstance(header, Header), "checked when it was read"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.time))
    print(f"core {header.pid} ended at {when}: {header.reason}")
    if header.traceback:
        print(header.traceback.rstrip("\n"))
    count = {kind: sum(isinstance(line, kind) for line in rest) for kind in (LiveLine, AddLine, CallLine, StepLine)}
    begin = "all of its life" if header.is_whole else f"{count[LiveLine]} requests unfinished before"
    print(f"{begin}, {count[StepLine]} steps, {count[AddLine]} requests, {count[CallLine]} calls")
    if arguments.replay:
        _print_replay(lines, is_whole=header.is_whole)
        return
    entries = [line for line in rest if not isinstance(line, LiveLine)]
    for line in entries[max(len(entries) - arguments.last, 0) :]:
        print(_format_line(line))


def _print_stacks(file: Path, *, replays: bool) -> None:
    if replays:
        hint = "A crash leaves the stacks of its threads, and no steps."
        raise RequestError.for_field("--replay", str(file), "with a file named *.jsonl", hint)
    print(f"native code of a core crashed, or a hanging one was ended; where its threads were:\n{read_stacks(file)}")


def _print_replay(lines: list[Line], *, is_whole: bool) -> None:
    found = replay(lines)
    compared = "each scheduled as recorded" if is_whole else "the beginning is not in the file: schedules not compared"
    print(f"replayed {found.num_steps} steps without a model; {found.difference or compared}")
    print(f"the scheduler fails alone: {found.failure}" if found.failure else "the scheduler alone does not fail")


def _format_line(line: Line) -> str:
    match line:
        case AddLine(at, request):
            return f"{at:10.3f} s  request {request.id}: {request.num_tokens} tokens, n={request.n}"
        case CallLine(at, name, arguments, is_verb):
            shown = "" if is_verb else f"({', '.join(map(repr, arguments))})"
            return f"{at:10.3f} s  {'verb' if is_verb else 'core'} {name}{shown:.100}"
        case StepLine(at, step, version, rows, samples):
            named = ", ".join(f"{row[0]} [{row[1]}, {row[1] + row[2]})" for row in rows[:_NUM_NAMED])
            more = f" and {len(rows) - _NUM_NAMED} more" if len(rows) > _NUM_NAMED else ""
            tokens = sum(row[2] for row in rows)
            return (
                f"{at:10.3f} s  step {step}, version {version}: {tokens} tokens, {len(samples)} samples: {named}{more}"
            )
        case EndLine(at, seconds, ended, problem):
            ends = ", ".join(f"{sequence_id} {reason}" for sequence_id, reason in ended[:_NUM_NAMED])
            parts = [f"took {seconds:.6f} s", *(["ended " + ends] if ends else []), *([problem] if problem else [])]
            return f"{at:10.3f} s    {'; '.join(parts)}"
    return str(line)
