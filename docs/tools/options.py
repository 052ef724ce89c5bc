"""Every option with its type, bounds, default and docstring, from the classes that check them: `markdown()`.

python docs/tools/options.py        prints the page's generated part
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as kinds

from rollout_engine.base.beam_search import BeamSearchParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.capacity import options as capacity
from rollout_engine.cli.main import COMMANDS, PROGRAM, load_command
from rollout_engine.rollouts.episodes.plan import EpisodeOptions
from rollout_engine.rollouts.evaluation.sweep import Sweep
from rollout_engine.rollouts.evaluation.tasks import EvalTask
from rollout_engine.serve.options import ServeOptions
from rollout_engine.text.conversations import ChatOptions

SECTIONS: tuple[tuple[str, str, type], ...] = (
    (
        "An engine",
        "`LLM(path, ...)`, `AsyncLLM`, `RolloutPolicy.from_pretrained`, `serve`, and `EngineConfig`.",
        EngineConfig,
    ),
    ("Drafted tokens", "`speculation=SpeculationConfig(...)`, or a dict of these.", SpeculationConfig),
    ("Sampling", "`SamplingParams(...)`, or a dict of these.", SamplingParams),
    ("Beam search", "`BeamSearchParams(...)` of `LLM.beam_search`, or a dict of these.", BeamSearchParams),
    ("Pooling", "`PoolingParams(...)` of `LLM.encode`.", PoolingParams),
    ("Conversations", "Keyword arguments of `rollout`, `collect`, `generate` and `chat`.", ChatOptions),
    ("Episodes", "Keyword arguments of `rollout` and `arollout` with `env=`.", EpisodeOptions),
    ("An evaluation", "`EvalTask(...)` of `RolloutPolicy.evaluate`.", EvalTask),
    ("A sweep", "`sweep=` of `RolloutPolicy.evaluate`: a dict of these, or a file.", Sweep),
    ("The HTTP server", "`ServeOptions(...)`; on the command line with dashes: `--max-connections`.", ServeOptions),
)


def markdown() -> str:
    """All sections: the classes of options, the tables of a fleet file, and the command line."""
    parts = [f"## {title}\n\n{where}\n\n{_fields(cls)}" for title, where, cls in SECTIONS]
    parts.append("## A fleet file\n\nTables of the TOML file that `rollout-engine simulate` reads.\n")
    for name, cls in _fleet_tables():
        parts.append(f"### Table `[{name}]`\n\n{_doc(cls)}\n\n{_fields(cls)}")
    parts.append("## The command line\n")
    parts += [f"### {PROGRAM} {name}\n\n```text\n{_help(name)}```\n" for name in COMMANDS]
    return "\n".join(parts)


def _fields(cls: type) -> str:
    rows = ["| option | takes | default | meaning |", "|---|---|---|---|"]
    documents = _field_docs(cls)
    for name, takes, default in _described(cls):
        rows.append(f"| `{name}` | {_cell(takes)} | {_cell(default)} | {_cell(documents.get(name, ''))} |")
    return "\n".join(rows) + "\n"


def _described(cls: type) -> Iterator[tuple[str, str, str]]:
    """(name, what it takes, default) of each option of a struct or a TypedDict."""
    if not issubclass(cls, msgspec.Struct):
        for name, annotation in _annotations(cls).items():
            yield name, f"`{annotation}`", ""
        return
    for field in kinds.type_info(cls).fields:  # type: ignore[attr-defined]
        yield field.name, words(field.type), _default(field)


def words(kind: kinds.Type) -> str:
    """The values that an option takes, in words."""
    match kind:
        case kinds.IntType() | kinds.FloatType():
            name = "int" if isinstance(kind, kinds.IntType) else "number"
            return f"{name}{_bounds(kind)}"
        case kinds.UnionType():
            return " or ".join(words(each) for each in kind.types)
        case kinds.LiteralType():
            return " or ".join(f"`{_quoted(value)}`" for value in kind.values)
        case kinds.ListType() | kinds.VarTupleType() | kinds.SetType():
            return f"list of {words(kind.item_type)}"
        case kinds.DictType():
            return f"dict of {words(kind.key_type)} to {words(kind.value_type)}"
        case kinds.StructType():
            return f"`{kind.cls.__name__}`"
        case kinds.CustomType():
            return f"`{getattr(kind.cls, '__name__', kind.cls)}`"
    return {"StrType": "str", "BoolType": "bool", "NoneType": "None", "AnyType": "anything"}[type(kind).__name__]


def _bounds(kind: Any) -> str:
    """The bounds of a number: ", 1 to 64", ", above 0"."""
    if kind.ge is not None and kind.le is not None:
        return f", {_number(kind.ge)} to {_number(kind.le)}"
    given = {"at least": kind.ge, "above": kind.gt, "at most": kind.le, "below": kind.lt}
    return "".join(f", {name} {_number(value)}" for name, value in given.items() if value is not None)


def _number(value: float) -> str:
    """A bound; large powers of two as such."""
    if isinstance(value, int) and value > 1 << 16:
        for power, rest in ((value, ""), (value + 1, " - 1")):
            if power & (power - 1) == 0:
                return f"2<sup>{power.bit_length() - 1}</sup>{rest}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _default(field: kinds.Field) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{_quoted(field.default)}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{_quoted(field.default_factory())}`"
    return "must be given"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _fleet_tables() -> Iterator[tuple[str, type]]:
    """(name, class) of each table of a fleet file, and of the tables in these."""
    whole = next(cls for _, cls in inspect.getmembers(capacity, inspect.isclass) if _is_whole(cls))
    seen = set()
    waiting = [("", whole)]
    while waiting:
        above, cls = waiting.pop(0)
        for field in kinds.type_info(cls).fields:  # type: ignore[attr-defined]
            for each in getattr(field.type, "types", [field.type]):
                if isinstance(each, kinds.StructType) and each.cls not in seen:
                    seen.add(each.cls)
                    waiting.append((f"{above}{field.name}.", each.cls))
                    yield f"{above}{field.name}", each.cls


def _is_whole(cls: type) -> bool:
    """Whether a class holds tables."""
    return issubclass(cls, msgspec.Struct) and any(
        isinstance(field.type, kinds.StructType)
        for field in kinds.type_info(cls).fields  # type: ignore[attr-defined]
    )


def _help(name: str) -> str:
    """The text that `--help` of a command prints."""
    command = load_command(name)
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=command.__doc__,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
    )
    command.add_arguments(parser)
    return parser.format_help()


def _doc(cls: type) -> str:
    return inspect.getdoc(cls) or ""


def _bodies(cls: type) -> Iterator[list[ast.stmt]]:
    """The bodies of a class and of those it inherits from, the root first."""
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("rollout_engine"):
            definition = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
            assert isinstance(definition, ast.ClassDef)
            yield definition.body


def _annotations(cls: type) -> dict[str, str]:
    return {
        line.target.id: ast.unparse(line.annotation)
        for body in _bodies(cls)
        for line in body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _field_docs(cls: type) -> dict[str, str]:
    """Option -> the docstring below it."""
    found = {}
    for body in _bodies(cls):
        for line, below in zip(body, body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    found[line.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(markdown())
