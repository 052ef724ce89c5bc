"""The tables of docs/models.md, made from results.json; the prose around them is written by hand."""

import re
from collections import defaultdict
from pathlib import Path

from rollout_engine.model.loading.type_aliases import ALIASES
from tests.models.published import PUBLISHED
from tests.models.results import SERVED, Row, names_of, outcome_of, reason_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = r"(?<=<!-- begin: {0} -->\n).*?(?=<!-- end: {0} -->)"
_MOST_LETTERS = 220
"""Of a reason; the whole is in results.json."""
_NOT_SHARED = re.compile(
    r", and only these are served: .*"
    r"| by \S+ of the largest \(allowed: \S+\)"
    r"|\. Leave it out$"
)
"""Figures and advice in reasons, so that types share the rest."""


def updated(page: str, results: dict[str, Row]) -> str:
    """The page with its tables as `results` have them. ValueError if a place for one is missing."""
    for name, table in (("types", types_part(results)), ("composites", composites_part(results))):
        pattern = re.compile(MARK.format(name), re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"{PAGE.name} needs the lines <!-- begin: {name} --> and <!-- end: {name} --> once each.")
        page = pattern.sub(lambda _, table=table: f"\n{table}\n", page)
    return page


def types_part(results: dict[str, Row]) -> str:
    """Tables of the causal LMs: exact ones, those up to round-off, and those that are refused."""
    exact = names_of(results, "type", "exact")
    lines = [
        _count(results),
        "",
        "| `model_type` | published models | float32 | bfloat16 | gradients | two ranks | device | layers on a CPU |",
        "|---|---|---|---|---|---|---|---|",
        *(_exact_row(name, results[name]) for name in exact),
        "",
        *_exceptions({name: results[name] for name in exact}),
        *_reasons("served, equal up to round-off only, because", results, "type", "round-off"),
        *_reasons("refused, because", results, "type", "refused"),
    ]
    if untried := names_of(results, "type", "untried"):
        lines.append(f"Not tried, since transformers builds no tiny model by the recipe: {_list(untried)}.")
    return "\n".join(lines).rstrip()


def composites_part(results: dict[str, Row]) -> str:
    """Tables of the composites: those whose text is served, and those that are refused."""
    lines = ["| composite | published models | float32 | bfloat16 | layers on a CPU |", "|---|---|---|---|---|"]
    for name in names_of(results, "composite", *SERVED):
        cells = _cells(results[name], "float32", "bfloat16", "layers")
        lines.append(_line(f"`{name}`", PUBLISHED.get(name, ""), *cells))
    return "\n".join([*lines, "", *_reasons("refused, because", results, "composite", "refused")]).rstrip()


def _count(results: dict[str, Row]) -> str:
    """How many types are exact, and with which versions they were tried."""
    exact = {name: results[name] for name in names_of(results, "type", "exact")}
    num_both = len(names_of(exact, "type", "exact", column="bfloat16"))
    num_fast = len(names_of(exact, "type", "one call", column="layers"))
    num_types = sum(row["kind"] == "type" for row in results.values())
    versions = "; ".join(sorted({row["made_with"] for row in results.values()}))
    return (
        f"Of {num_types} causal LMs of transformers {len(exact)} are equal to the trainer, bit for bit, in float32, "
        f"{num_both} of them in bfloat16 too; the layers of {num_fast} run as one C++ call. Made with {versions}."
    )


def _exact_row(name: str, row: Row) -> str:
    aliases = [alias for alias, to in ALIASES.items() if to.model_type == name]
    title = f"`{name}`{'' if row['sizes'] == 'own' else ' *'}" + "".join(f", `{alias}`" for alias in aliases)
    published = "; ".join(PUBLISHED[each] for each in (name, *aliases) if each in PUBLISHED)
    return _line(title, published, *_cells(row, "float32", "bfloat16", "gradients", "ranks", "device", "layers"))


def _cells(row: Row, *columns: str) -> list[str]:
    return [outcome_of(row.get(column, "not tried")) for column in columns]


def _exceptions(rows: dict[str, Row]) -> list[str]:
    """A list of reasons why exact types have other outcomes in a column; results.json has those for devices, too."""
    columns = {"bfloat16": "in bfloat16", "gradients": "gradients", "ranks": "over two ranks"}
    lines = []
    for column, words in columns.items():
        for reason, names in _by_reason(rows, column).items():
            lines.append(f"* {words}, {outcome_of(rows[names[0]][column])}: {_list(names)}: {reason}")
    return [*lines, ""] if lines else []


def _reasons(title: str, results: dict[str, Row], kind: str, outcome: str) -> list[str]:
    """A table of the types with this outcome in float32, by reason."""
    rows = {name: results[name] for name in names_of(results, kind, outcome)}
    if not rows:
        return []
    lines = [_line(reason, _list(names)) for reason, names in _by_reason(rows, "float32").items()]
    return [f"| {title} | |", "|---|---|", *lines, ""]


def _by_reason(rows: dict[str, Row], column: str) -> dict[str, list[str]]:
    """Names by the reason in a column, those of the commonest reason first; without rows that have none."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        if reason := reason_of(row.get(column, "")):
            found[_shorten(reason)].append(name)
    return dict(sorted(found.items(), key=lambda each: (-len(each[1]), each[0])))


def _shorten(reason: str) -> str:
    """A reason in words that types share."""
    reason = re.sub(
        r", and only these are served: .*| by \S+ of the largest \(allowed: \S+\)|\. Leave it out$", "", reason
    )
    plain = reason.replace("|", "/").replace("<", "&lt;")
    return plain if len(plain) <= _MOST_LETTERS else plain[:_MOST_LETTERS].rpartition(" ")[0] + " ..."


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`{f' ({PUBLISHED[name]})' if name in PUBLISHED else ''}" for name in names)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
