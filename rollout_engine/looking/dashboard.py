"""A run in a terminal, drawn anew while it continues.

q    quit
"""

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static


class Dashboard(App[None]):
    """Shows lines of text that `read` returns, every few seconds."""

    BINDINGS: ClassVar = [("q", "quit", "quit")]
    CSS = "#lines { padding: 0 1; }"

    def __init__(self, read: Callable[[int], list[str]], title: str, seconds: float) -> None:
        """`read` takes the columns of the screen; its lines have no control characters."""
        super().__init__()
        self.title = title
        self._read, self._seconds = read, seconds
        self.shown = Text()
        """The picture as it is drawn."""

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="lines")
        yield Footer()

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(self._seconds, self._draw)

    def _draw(self) -> None:
        self.shown = Text("\n".join(self._read(max(self.size.width - 3, 40))), no_wrap=True, overflow="ellipsis")
        self.query_one("#lines", Static).update(self.shown)
