"""Faults planted in our own code: one function whose source has been changed in one place."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest


class Plant(NamedTuple):
    """`old` in the source of `owner.name` becomes `new`."""

    owner: Any
    name: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is there inside. Fails where the source does not have `old`, once."""
        function = inspect.unwrap(inspect.getattr_static(self.owner, self.name))
        code, made = function.__code__, dict[str, Any]()
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.name} has changed: the plant does not fit it"
        lines_before = "\n" * (code.co_firstlineno - 1)
        exec(
            compile(lines_before + source.replace(self.old, self.new), code.co_filename, "exec"),
            function.__globals__,
            made,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, made[self.name])
            yield
