"""Tries types of models and writes docs/models.md from the results.

    python -m tests.models                     what results.json lacks, or has of other versions or another machine
    python -m tests.models qwen3 glm4_moe      these types anew
    python -m tests.models --anew              all types anew
    python -m tests.models --part device       of either, one part alone: bits, gradients, ranks or device
    python -m tests.models --page              the page from results.json; runs no model
    python -m tests.models --check             whether the page is that one; runs no model

Each row is written when its type is done, so a run that was ended continues from there.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # Triton asks when transformers imports it

from tests.models import results
from tests.models.page import PAGE, updated


def run() -> int:
    """Do as the command line says; 1 if the page is not what the results say, or if a type went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(results.COLUMNS), default=[], dest="parts")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", metavar="TYPE")
    options = parser.parse_args()
    is_wrong = False
    if not (options.page or options.check):
        parts = options.parts or list(results.COLUMNS)
        is_wrong = _try_types(options.names, parts, anew=options.anew or bool(options.names))
    text = PAGE.read_text(encoding="utf-8")
    made = updated(text, results.read())
    if options.check:
        if made != text:
            print("docs/models.md is not what tests/models/results.json says: run `python -m tests.models --page`.")
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return int(is_wrong)


def _try_types(names: list[str], parts: list[str], *, anew: bool) -> bool:
    """Try parts of types, of all if no names are given, and write their rows; whether one went wrong."""
    import transformers

    from tests.models.tiny import all_names
    from tests.models.trial import describe_machine, tried

    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # rows have the reasons
    if strangers := sorted(set(names) - set(all_names())):
        sys.exit(f"transformers has no causal LM of type {', '.join(strangers)}, and it is no composite of ours.")
    rows, machine, is_wrong = results.read(), describe_machine(), False
    with tried() as trial:
        for name in names or all_names():
            row = rows.get(name)
            if row is None or row["made_with"] != machine:
                row, todo = None, ["bits", *parts]
            else:
                todo = parts if anew else [part for part in results.missing_parts(row) if part in parts]
            if not todo:
                continue
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                row = trial.try_type(name, Path(folder), row, todo)
            found = {column: row[column] for part in results.COLUMNS.values() for column in part if column in row}
            is_wrong |= any(results.outcome_of(each) == "wrong" for each in found.values())
            print(f"{name} ({time.perf_counter() - started:.0f} s): {found}", flush=True)
            rows = results.read() | {name: row}  # another run may have written some
            results.write(rows)
    return is_wrong


sys.exit(run())
