"""Record a command in a terminal, and draw the recording as an SVG that plays by itself and loads nothing.

python docs/tools/record_terminal.py record demo.cast -- make demo
python docs/tools/record_terminal.py draw demo.cast demo.svg --speed 20

A recording is a file of asciinema's (asciicast, version 2), so its own tools play it too. The picture has whole lines
alone: what a command writes over (a progress bar) shows as it stood when its line ended.
"""

import argparse
import json
import os
import pty
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rich.text import Text

WIDTH, CHARACTER, LINE, MARGIN, BAR = 100, 7.8, 18, 16, 34
"""Columns of the terminal; then pixels: width of a character, height of a line, margin, height of the title bar."""

STYLE = """
 .line { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d5dae3; white-space: pre }
 .prompt { fill: #7fd88f } .title { font: 13px system-ui, sans-serif; fill: #99a1b3 }
 .late { animation: appear 1ms backwards } @keyframes appear { from { visibility: hidden } }
 @media (prefers-reduced-motion: reduce) { .late, .scroll { animation-delay: 0s !important } }
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Records a command in a terminal, and draws the recording.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run a command and write what it shows")
    recording.add_argument("cast", type=Path)
    recording.add_argument("command", nargs="+", help="behind --")
    drawing = verbs.add_parser("draw", help="write a recording as an SVG")
    drawing.add_argument("cast", type=Path)
    drawing.add_argument("svg", type=Path)
    drawing.add_argument(
        "--speed", type=float, default=20.0, help="seconds of the recording in a second of the picture"
    )
    drawing.add_argument("--longest-wait", type=float, default=0.5, help="seconds of the picture without a new line")
    drawing.add_argument("--rows", type=int, default=18, help="lines that are seen at a time")
    options = parser.parse_args(arguments)
    if options.verb == "record":
        record(options.command, options.cast)
    else:
        command, lines = read(options.cast)
        lines = paced(lines, options.speed, options.longest_wait)
        options.svg.write_text(draw(command, lines, rows=options.rows), encoding="utf-8")


def record(command: Sequence[str], path: Path) -> None:
    """Run `command` under a terminal of its own, show what it writes, and keep it with its times."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    start = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with path.open("w", encoding="utf-8") as cast:
            header = {"version": 2, "width": WIDTH, "height": 24, "command": " ".join(command)}
            cast.write(json.dumps(header) + "\n")
            for chunk in chunks(ours):
                event = [round(time.perf_counter() - start, 3), "o", chunk.decode(errors="replace")]
                cast.write(json.dumps(event) + "\n")
                print(event[2], end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with status {process.returncode}: nothing to draw.")


def chunks(terminal: int) -> Iterator[bytes]:
    """All that is written to a terminal until its other end is closed, which Linux reports as an error."""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            return
        if not chunk:
            return
        yield chunk


def read(path: Path) -> tuple[str, list[tuple[float, Text]]]:
    """The command of a recording, and its lines with the seconds at which each ended."""
    header, *events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines, rest = [], ""
    for seconds, _, text in events:
        *ended, rest = (rest + text.replace("\r\n", "\n")).split("\n")
        lines += [(seconds, Text.from_ansi(line.rpartition("\r")[2])) for line in ended]
    return header["command"], lines


def paced(lines: list[tuple[float, Text]], speed: float, longest: float) -> list[tuple[float, Text]]:
    """The lines with the seconds at which the picture shows them: faster than they came, and without long waits."""
    found, before, now = [], 0.0, 1.0
    for seconds, text in lines:
        now, before = now + min((seconds - before) / speed, longest), seconds
        found.append((now, text))
    return found


def draw(command: str, lines: list[tuple[float, Text]], *, rows: int) -> str:
    """The recording as an SVG: lines appear in their time, the oldest leave at the top, and the last ones stay."""
    rows = min(rows, len(lines) + 1)
    width, height = round(WIDTH * CHARACTER + 2 * MARGIN), BAR + rows * LINE + MARGIN
    shown = [f'<text class="line" x="{MARGIN}" y="{LINE - 4}"><tspan class="prompt">$</tspan> {escape(command)}</text>']
    steps = []
    for number, (at, text) in enumerate(lines, 1):
        shown.append(
            f'<text class="line late" x="{MARGIN}" y="{number * LINE + LINE - 4}" style="animation-delay:{at:.2f}s">'
            f"{escape(text.plain[:WIDTH])}</text>"
        )
        if number >= rows:
            steps.append((at, number - rows + 1))
    return "\n".join(
        [
            f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>{escape(command)}, faster than it ran</title>",
            f"<style>{STYLE}{scrolling(steps)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f2a"/>',
            *(f'<circle cx="{20 + 20 * i}" cy="17" r="6" fill="{c}"/>' for i, c in enumerate(DOTS)),
            f'<text class="title" x="{width / 2}" y="22" text-anchor="middle">{escape(command)}</text>',
            f'<svg y="{BAR}" width="{width}" height="{rows * LINE + 4}"><g class="scroll">',
            *shown,
            "</g></svg>",
            "</svg>\n",
        ]
    )


NAMESPACE = "http://www.w3.org/2000/svg"
DOTS = ("#ff5f57", "#febc2e", "#28c840")


def scrolling(steps: list[tuple[float, int]]) -> str:
    """The animation that moves all lines up at each of `steps`: seconds, and the lines that have left by then."""
    if not steps:
        return ""
    duration = steps[-1][0]
    frames = [f"{100 * at / duration:.3f}% {{ transform: translateY(-{number * LINE}px) }}" for at, number in steps]
    return (
        f" @keyframes scroll {{ 0% {{ transform: translateY(0) }} {' '.join(frames)} }}\n"
        f" .scroll {{ animation: scroll {duration:.2f}s step-end forwards;"
        f" transform: translateY(-{steps[-1][1] * LINE}px) }}\n"
    )


if __name__ == "__main__":
    main()
