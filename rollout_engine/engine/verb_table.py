"""Verbs by name, and the table of every engine's, which the modules of `rollout_engine.engine.verbs` fill."""

from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar, cast

from rollout_engine.engine.verb import Verb, verb_of

P = ParamSpec("P")
R = TypeVar("R")


class VerbTable(dict[str, Verb]):
    """Verbs by name."""

    def add(self, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function to make it a verb; its name, annotations and docstring are the verb's."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self[function.__name__] = verb_of(function, **options)
            return function

        return register

    def add_in_pieces(self, **options: Any) -> Callable[[Callable[P, Generator[None, None, R]]], Callable[P, R]]:
        """Decorate a generator function to make it a verb that runs in pieces: steps run wherever it yields.

        Each piece is to be about as long as a step. The commit of a weight update waits for the last piece.
        """

        def register(function: Callable[P, Generator[None, None, R]]) -> Callable[P, R]:
            verb = self[function.__name__] = verb_of(function, in_pieces=True, **options)
            function.__annotations__["return"] = verb.result  # as faces show it
            return cast(Callable[P, R], function)

        return register


VERBS = VerbTable()
"""Every verb of an engine, but those of weight updates."""
