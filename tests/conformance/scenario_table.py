"""The table of scenarios, one for each verb, which `scenarios` and `adapter_scenarios` fill."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rollout_engine import LLMEngine


class Scenario(NamedTuple):
    """A verb's row."""

    play: Callable[[LLMEngine], Any]
    refused_in: frozenset[str]
    """States of `test_states` in which it raises. After shutdown it does too, unless its row says `after_shutdown`."""
    arguments: dict[str, Any]
    """Those that a call needs."""


SCENARIOS: dict[str, Scenario] = {}
"""By the name of the verb."""


def scenario(refused_in: str = "", **arguments: Any) -> Callable[[Callable[[LLMEngine], Any]], None]:
    """Decorate the scenario of the verb of its name."""

    def register(play: Callable[[LLMEngine], Any]) -> None:
        SCENARIOS[play.__name__] = Scenario(play, frozenset(refused_in.split()), arguments)

    return register


def call(engine, name, /, **arguments):
    """Call a verb by its name, past the faces."""
    return engine.frontend.client.call(name, arguments).result()
