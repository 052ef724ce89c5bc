"""Draws the pictures of the concept pages: python docs/tools/drawings.py [FOLDER]

Each is an SVG of boxes, arrows and texts on a card of its own, whose colours follow the reader's light or dark setting
together, so it can be read on either page. It loads nothing.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
 .card { fill: #f5f7fb } text { font: 14px system-ui, "Segoe UI", sans-serif; fill: #1d2433 }
 .small { font-size: 12px } .mono { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px }
 .head { font-weight: 600 } .faint { fill: #55607a }
 .box { stroke: #8892a8; fill: #ffffff } .beside { stroke: #8892a8; stroke-dasharray: 4 3; fill: none }
 .blue { fill: #d4e4ff; stroke: #4a78c8 } .green { fill: #d3f0d8; stroke: #3d9150 }
 .orange { fill: #ffe3c2; stroke: #c07a25 } .red { fill: #ffd6d6; stroke: #c04a4a }
 .arrow { stroke: #55607a; fill: none; stroke-width: 1.5 } .tip { fill: #55607a }
 @media (prefers-color-scheme: dark) {
  .card { fill: #1e2430 } text { fill: #e4e8f1 } .faint { fill: #a9b3c9 }
  .box { fill: #2a3242; stroke: #76829c } .beside { stroke: #76829c }
  .blue { fill: #24406f; stroke: #6f9be8 } .green { fill: #1f4d2b; stroke: #62b877 }
  .orange { fill: #5f3f16; stroke: #dd9f52 } .red { fill: #622a2a; stroke: #dd7a7a }
  .arrow { stroke: #a9b3c9 } .tip { fill: #a9b3c9 }
 }
"""


class Drawing:
    """An SVG that grows by boxes, texts and arrows. Coordinates are pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="tip" d="M0 0 8 4 0 8z"/></marker>',
            f'<rect class="card" width="{width}" height="{height}" rx="10"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "box") -> None:
        """A box with centred lines of text."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 17 * (i - (len(lines) - 1) / 2), line, anchor="middle")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points, with a tip at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="arrow" marker-end="url(#tip)" points="{path}"/>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def exactness() -> Drawing:
    """One answer, computed in pieces beside others, and again in one pass."""
    d = Drawing(860, 380, "The engine computes an answer in pieces, the trainer in one pass; the bits are the same")
    d.text(24, 34, "Engine: many steps, each with whatever else runs", "head")
    names = ["step 1", "step 2", "step 3", "step 4", "step 5"]
    widths, x = [190, 130, 110, 110, 110], 24
    for i, (name, width) in enumerate(zip(names, widths, strict=True)):
        d.text(x, 60, name, "small faint")
        d.box(x, 68, width, 22, kind="beside")
        if i != 1:
            d.box(x, 120, width, 22, kind="beside")
        d.box(x, 94, width, 22, ["prompt", "its rest", "token 1", "token 2", "token 3"][i], "blue")
        x += width + 12
    d.text(x, 84, "others’ sequences", "small faint")
    d.text(x, 110, "this sequence", "small faint")
    d.text(24, 276, "Trainer: one pass over all of it", "head")
    d.box(24, 288, 698, 26, "prompt, token 1, token 2, token 3", "green")
    for column in (385, 507, 629):
        d.arrow((column, 120), (column, 176))
        d.arrow((column, 288), (column, 214))
        d.box(column - 40, 180, 80, 30, "equal", "orange")
    d.text(24, 190, "log-prob of each sampled token,", "small")
    d.text(24, 207, "float32: all 32 bits the same", "small")
    for x, y, text in (
        (24, 344, "Products: a row is summed in one order, whatever is beside it."),
        (24, 364, "Attention: KV in fixed tiles of 64 positions."),
        (430, 344, "Draws: by (seed, position) and the sequence’s own logits."),
        (430, 364, "So batches, chunks, cache hits and preemptions leave no trace."),
    ):
        d.text(x, y, text, "small faint")
    return d


def versions() -> Drawing:
    """An answer over two weight updates: its versions under both ways to treat its KV."""
    d = Drawing(860, 400, "Tokens, policy versions and KV of a request over two weight updates")
    d.text(24, 34, "A request that lives through two updates", "head")
    kinds = ["blue"] * 3 + ["green"] * 3 + ["orange"] * 3
    left, cell = 290, 58
    for i, kind in enumerate(kinds):
        d.box(left + i * cell, 78, cell - 6, 30, f"t{i}", kind)
    for i, version in ((3, 1), (6, 2)):
        x = left + i * cell - 3
        d.arrow((x, 52), (x, 74))
        d.text(x, 46, f"commit of version {version}", "small faint", "middle")
    rows = [
        (140, "policy_version", "the weights that sampled it", "000111222"),
        (190, 'kv_min_version, kv="keep"', "goes on over the old KV", "000000000"),
        (240, 'kv_min_version, kv="recompute"', "KV is computed again first", "000111222"),
    ]
    for y, name, meaning, values in rows:
        d.text(24, y, name, "mono")
        d.text(24, y + 17, meaning, "small faint")
        for i, value in enumerate(values):
            kind = ("blue", "green", "orange")[int(value)]
            d.box(left + i * cell, y - 16, cell - 6, 28, value, kind)
    d.text(24, 296, "Prefix cache: a block is found by its tokens, all before them, and its version", "head")
    for i, (text, kind) in enumerate(
        [
            ("“The capital of”\nversion 0", "blue"),
            ("“The capital of”\nversion 1", "green"),
            ("looked up\nunder version 1", "box"),
        ]
    ):
        d.box(24 + i * 270, 314, 190, 52, text, kind)
    d.arrow((564, 340), (488, 340))
    d.text(526, 334, "hit", "small", "middle")
    d.text(
        24,
        388,
        "Nothing is flushed: old blocks are no longer asked for, and are reused in their turn.",
        "small faint",
    )
    return d


def update() -> Drawing:
    """The phases of a weight update, and what the engine does meanwhile."""
    d = Drawing(860, 360, "A weight update is a transaction; steps go on until its commit")
    d.text(24, 34, "Update", "head")
    phases = [
        ("begin", "manifest: names,\nshapes, versions"),
        ("stage", "tensors into the\nshadow"),
        ("verify", "complete, digests,\nfinite, packed"),
        ("commit", "shadow becomes live,\nversion + 1"),
        ("confirm", "digest of what\nis live now"),
    ]
    for i, (name, text) in enumerate(phases):
        x = 24 + i * 166
        d.box(x, 50, 148, 84, kind="orange" if name == "commit" else "box")
        d.text(x + 74, 72, name, "head", "middle")
        for j, line in enumerate(text.split("\n")):
            d.text(x + 74, 95 + 17 * j, line, "small", "middle")
        if i < 4:
            d.arrow((x + 150, 92), (x + 164, 92))
    for i in range(3):
        x = 24 + i * 166 + 74
        d.arrow((x, 136), (x, 162), (x, 166))
    d.box(24, 170, 480, 34, "refused, late, or the trainer is gone: nothing has changed", "red")
    d.text(24, 250, "Engine", "head")
    for i in range(9):
        d.box(24 + i * 56, 264, 50, 32, "step", "blue")
    d.box(528, 264, 60, 32, "waits", "beside")
    for i in range(4):
        d.box(594 + i * 56, 264, 50, 32, "step", "green")
    d.text(24, 320, "old weights serve, bit for bit", "small faint")
    d.text(594, 320, "new weights; requests in flight go on", "small faint")
    d.arrow((596, 136), (558, 220), (558, 260))
    d.text(24, 344, "The report says how long the whole took, and how long steps stood still for it.", "small faint")
    return d


def fleet() -> Drawing:
    """A fleet in which a replica is lost: its request goes on elsewhere, to the same tokens."""
    d = Drawing(860, 420, "A fleet: one client, replicas, and a request that outlives its replica")
    d.box(24, 40, 250, 250, kind="box")
    d.text(149, 64, "your process", "head", "middle")
    d.box(44, 80, 210, 40, "LLM, AsyncLLM, policies")
    d.box(44, 136, 210, 62, "ledger: each request,\nits replica, its tokens so far", "blue")
    d.box(44, 214, 210, 56, "balancer: prefix, load,\nsession", "blue")
    replicas = [
        (40, "replica 0", "SYNCED", "green", "version 7"),
        (136, "replica 1", "DEAD, starts again", "red", "no version"),
        (232, "replica 2", "SYNCED", "green", "version 7"),
    ]
    for y, name, state, kind, version in replicas:
        d.box(520, y, 316, 76, kind=kind)
        d.text(540, y + 28, name, "head")
        d.text(540, y + 52, f"{state}, {version}", "small")
    d.arrow((276, 167), (400, 167), (400, 174), (514, 174))
    d.text(288, 158, "request, seed 42", "small")
    d.text(425, 192, "lost after t0 t1 t2", "small faint", "middle")
    d.arrow((276, 240), (400, 240), (400, 270), (514, 270))
    d.text(288, 231, "prompt + t0 t1 t2", "small")
    d.text(425, 292, "goes on at t3", "small faint", "middle")
    d.box(24, 330, 250, 40, "trainer: update_weights", "orange")
    d.box(330, 330, 170, 40, "published once, shm", "orange")
    d.arrow((276, 350), (326, 350))
    d.arrow((502, 350), (678, 350), (678, 312))
    d.text(690, 344, "every replica reads,", "small faint")
    d.text(690, 361, "verifies, then commits", "small faint")
    d.text(
        24,
        402,
        "A draw depends on (seed, position) and its own logits, so t3 is what replica 1 would have drawn.",
        "small faint",
    )
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "exactness": exactness,
    "versions": versions,
    "update": update,
    "fleet": fleet,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images"
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
