"""Words of the sources: docstrings, comments and messages of errors, each with its place."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from tests.contract.sources import Source


class Words(NamedTuple):
    """A docstring, comment or error message, and the line on which it begins."""

    line: int
    text: str


def words_of(source: Source) -> Iterator[Words]:
    """What a reader reads in a file, without its code: code in backticks is left out."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Words(node.lineno, _without_code(node.value.value))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield Words(part.lineno, _without_code(part.value))
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield Words(token.start[0], _without_code(token.string))


def _without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", lambda code: "X" + "\n" * code[0].count("\n"), text)
