"""Every Python file of the repository, parsed, with its imports."""

import ast
import functools
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("rollout_engine", "sync", "worker_ext", "envs_adapters")
FOR_EDITORS = ("rollout_engine", "rollout_engine.testing", "rollout_engine.testing.pytest_plugin")
"""Modules that import under TYPE_CHECKING, and load when they are used."""


class Import(NamedTuple):
    """One imported module, dotted, and where."""

    name: str
    line: int
    in_function: bool
    type_checking: bool


class Source(NamedTuple):
    """One Python file. `module` is its dotted name, `area` the top folder."""

    path: Path
    module: str
    area: str
    text: str
    tree: ast.Module

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def in_package(self) -> bool:
        return self.area in PACKAGES

    def __repr__(self) -> str:
        return self.where

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        yield from (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))

    def is_for_editors(self, found: Import) -> bool:
        """Whether `found` names public names or types for editors, in a module that loads nothing heavy."""
        return self.module in FOR_EDITORS and found.type_checking

    def imports(self) -> list[Import]:
        """Every import anywhere in the file: inside functions and under TYPE_CHECKING too."""
        return _imports_of(self)


def read_sources(folders: Iterable[str]) -> list[Source]:
    """Every Python file of `folders`, which are named from the repository's root."""
    gc.disable()  # it would walk the millions of nodes again and again, for longer than they take to parse
    try:
        return [_source(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    finally:
        gc.freeze()
        gc.enable()


def _source(path: Path) -> Source:
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Source(path, module, parts[0], text, ast.parse(text, str(path)))


@functools.cache
def _imports_of(source: Source) -> list[Import]:
    found: list[Import] = []
    _add_imports(found, source.tree, source.module, source.path.name == "__init__.py", False, False)
    return found


def _add_imports(
    found: list[Import], node: ast.AST, module: str, is_package: bool, inside: bool, checking: bool
) -> None:
    if isinstance(node, ast.Import):
        found += (Import(alias.name, node.lineno, inside, checking) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, module, is_package)
        found += (Import(_module_of(base, alias.name), node.lineno, inside, checking) for alias in node.names)
    elif isinstance(node, ast.expr):
        return  # an expression holds no statement
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    checking = checking or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    for child in ast.iter_child_nodes(node):
        _add_imports(found, child, module, is_package, inside, checking)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    anchor = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
    return ".".join([*anchor, *([node.module] if node.module else [])])


def _module_of(base: str, name: str) -> str:
    """`from base import name`: the module meant is `base.name` where that is a module of ours, else `base`."""
    path = ROOT.joinpath(*base.split("."), name)
    return f"{base}.{name}" if path.is_dir() or path.with_suffix(".py").is_file() else base
