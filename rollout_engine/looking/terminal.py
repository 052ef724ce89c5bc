"""Rollouts and runs to look at in a terminal.

`RolloutViewer` shows a table of samples, and the chosen one, its group, or two side by side; `Dashboard` a run's lines.

up, down    choose a sample          /    search        s    sort by the next column
c           colour by the next       g    its group     d    compare with the sample chosen before
f           fold turns               q    quit
"""

import difflib
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.panel import Panel
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from rollout_engine.batches.picture_files import IN_FOLDER, damaged_pictures, named_pictures
from rollout_engine.looking.samples import Viewed, advantages, visible

_COLOURS = ("log-prob", "advantage", "version", "turn", "nothing")
_SORTS = ("file", "reward", "length", "log-prob")
_HUES = ("#1b4965", "#5b3a76", "#2d5a3d", "#6b4a1c", "#5c2a36", "#1f5560")
_MOST_TOKENS = 4_000
"""Tokens of a sample that are drawn."""
_MOST_COMPARED = 2_000
"""Tokens of a sample that are compared with another's, which takes the time of their product."""


class _Cell(Text):
    """One line of text about a sample. A table measures every row, so its width is known without a layout."""

    def __init__(self, text: str, index: int) -> None:
        super().__init__(text)
        self.index = index
        """Place of the sample among all."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(self.plain)
        return Measurement(width, width)


class RolloutViewer(App[None]):
    """Shows the samples of a file."""

    TITLE = "rollouts"
    CSS = """
    #table { width: 45%; }
    #right { width: 55%; padding: 0 1; }
    #search { display: none; }
    #search.open { display: block; }
    """
    BINDINGS: ClassVar = [
        ("/", "search", "search"),
        ("s", "sort", "sort"),
        ("c", "colour", "colour"),
        ("g", "group", "group"),
        ("d", "compare", "compare"),
        ("f", "fold", "fold turns"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, samples: Sequence[Viewed], title: str) -> None:
        super().__init__()
        self.title = title
        self._samples, self._advantages = samples, advantages(samples)
        self._most = max((abs(a) for a in self._advantages if a is not None), default=0.0) or 1.0
        self._words, self._sort, self._colour = "", 0, 0
        self._folds, self._chosen, self._before = True, 0, 0
        self.shown = Text()
        """Content of the right side."""

    def compose(self) -> ComposeResult:
        yield Input(placeholder="search in prompts and responses, Enter to go on", id="search")
        with Horizontal():
            yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
            with VerticalScroll(id="right"):
                yield Static(id="detail")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for name in ("sample", "reward", "tokens", "log-prob", "response"):
            table.add_column(name, key=name)
        self._fill()
        table.focus()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        self._choose(int(str(event.row_key.value)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._words = event.value.lower()
        event.input.remove_class("open")
        self._fill()
        self.query_one(DataTable).focus()

    def action_search(self) -> None:
        """Open the line to search with."""
        search = self.query_one("#search", Input)
        search.add_class("open")
        search.focus()

    def action_sort(self) -> None:
        """Sort by the next of: order of the file, reward, length, log-prob."""
        self._sort = (self._sort + 1) % len(_SORTS)
        self._order()

    def action_colour(self) -> None:
        """Colour tokens by the next of: log-prob, advantage, version, turn, nothing."""
        self._colour = (self._colour + 1) % len(_COLOURS)
        self._show(self._card(self._chosen))

    def action_fold(self) -> None:
        """Show the messages of environments and tools, or only their length."""
        self._folds = not self._folds
        self._show(self._card(self._chosen))

    def action_group(self) -> None:
        """Show all samples of the chosen one's group."""
        mates = [i for i, each in enumerate(self._samples) if each.group == self._samples[self._chosen].group]
        self._show(Group(*(self._panel(i) for i in mates)))

    def action_compare(self) -> None:
        """Show the differences between the chosen sample and the one that was chosen before."""
        one, other = self._samples[self._before], self._samples[self._chosen]
        text = Text(f"{one.name} (red) and {other.name} (green)\n\n")
        gone, new = one.pieces[:_MOST_COMPARED], other.pieces[:_MOST_COMPARED]
        for kind, a, b, c, d in difflib.SequenceMatcher(None, gone, new, autojunk=False).get_opcodes():
            if kind == "equal":
                text.append(visible("".join(gone[a:b])))
                continue
            text.append(visible("".join(gone[a:b])), "white on #7a2222")
            text.append(visible("".join(new[c:d])), "white on #1f5f2f")
        if max(len(one.pieces), len(other.pieces)) > _MOST_COMPARED:
            text.append(f" [only the first {_MOST_COMPARED} tokens are compared]", "italic dim")
        self._show(text)

    def _fill(self) -> None:
        """Put the samples that are searched for into the table, in their order."""
        table = self.query_one(DataTable)
        table.clear()
        for i, each in enumerate(self._samples):
            if self._words in f"{each.prompt}\n{each.response}".lower():
                place = f"{each.sample['group_id']}·{each.sample['sample_index']}"
                start = visible(" ".join(each.response[:200].split()))
                cells = (place, _number(each.reward), str(len(each.pieces)), _number(each.mean_log_prob), start)
                table.add_row(*(_Cell(cell, i) for cell in cells), key=str(i))
        self._order()

    def _order(self) -> None:
        """Bring the samples of the table into their order, the first to the cursor."""
        table = self.query_one(DataTable)
        table.sort("sample", key=lambda cell: self._sort_key(cell.index))
        table.move_cursor(row=0, animate=False)
        if table.row_count:  # the cursor may have been there, at another sample
            self._choose(table.get_row_at(0)[0].index)
        self.sub_title = f"{table.row_count} of {len(self._samples)} samples, by {_SORTS[self._sort]}"

    def _choose(self, i: int) -> None:
        if i != self._chosen:
            self._before, self._chosen = self._chosen, i
        self._show(self._card(i))

    def _sort_key(self, i: int) -> tuple[float, int]:
        each = self._samples[i]
        by = {"reward": -(each.reward or 0.0), "length": -len(each.pieces), "log-prob": each.mean_log_prob}
        return float(by.get(_SORTS[self._sort], 0)), i

    def _show(self, content: Any) -> None:
        self.shown = content
        self.query_one("#detail", Static).update(content)

    def _card(self, i: int) -> Group:
        sample = self._samples[i].sample
        facts: dict[str, Any] = {"reward": _number(self._samples[i].reward), "advantage": _number(self._advantages[i])}
        facts |= {"ended by": sample.get("ended_by") or sample.get("finish_reason"), "seed": sample["seed"]}
        facts |= {"versions": ", ".join(map(str, sorted({*sample["policy_version"]} - {-1})))}
        facts |= {**(sample.get("rewards") or {}), **(sample.get("columns") or {})}
        if names := named_pictures(sample):
            facts["pictures"] = f"{sample.get(IN_FOLDER, 'in memory')}: {', '.join(f'{name}.png' for name in names)}"
            facts |= {f"picture {name}": problem for name, problem in damaged_pictures([sample]).items()}
        told = Text("\n".join(visible(f"{name}: {value}") for name, value in facts.items()))
        return Group(told, Panel(Text(visible(self._samples[i].prompt)), title="prompt"), self._panel(i))

    def _panel(self, i: int) -> Panel:
        title = Text(f"{self._samples[i].name}: reward {_number(self._samples[i].reward)}")
        return Panel(self._tokens(i), title=title, subtitle=Text(f"colour: {_COLOURS[self._colour]}"))

    def _tokens(self, i: int) -> Text:
        each, text = self._samples[i], Text()
        versions = each.sample["policy_version"][:_MOST_TOKENS]
        for sampled, places in groupby(range(len(versions)), lambda place: versions[place] >= 0):
            span = list(places)
            if not sampled and self._folds:
                text.append(f" [{len(span)} tokens of others: f unfolds] ", "italic dim")
                continue
            for place in span:
                text.append(visible(each.pieces[place]), self._style(i, place) if sampled else "italic dim")
        if len(each.pieces) > _MOST_TOKENS:
            text.append(f" [{len(each.pieces) - _MOST_TOKENS} more tokens]", "italic dim")
        return text

    def _style(self, i: int, place: int) -> Style | str:
        sample, by = self._samples[i].sample, _COLOURS[self._colour]
        if by == "log-prob":
            return _on(130, 50, 20, 1 - math.exp(sample["log_probs"][place]))
        if by == "advantage":
            value = (self._advantages[i] or 0.0) / self._most
            return _on(20, 100, 40, value) if value > 0 else _on(130, 30, 30, -value)
        numbers = sample["policy_version"] if by == "version" else sample.get("turns")
        if by in ("version", "turn") and numbers:
            return f"white on {_HUES[numbers[place] % len(_HUES)]}"
        return ""


class Dashboard(App[None]):
    """Shows lines of text that `read` returns, every `seconds`."""

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


def _on(red: int, green: int, blue: int, part: float) -> Style | str:
    """White text on a colour that is the stronger, the larger `part` in [0, 1]; none for nearly nothing."""
    if part < 0.02:
        return ""
    return f"white on #{int(red * part):02x}{int(green * part):02x}{int(blue * part):02x}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
