"""Digests of tasks: the same for the same task in every process, another for another task."""

import functools
from pathlib import Path

import numpy as np
import pytest

from rollout_engine import EvalTask
from rollout_engine.rollouts.episodes.tool_functions import tool_functions, tool_schemas
from rollout_engine.rollouts.evaluation.tasks import prepare_tasks

FIELDS = dict(name="t", rows=[{"prompt": "1 + 2?", "wanted": 3}])


def good(completions, wanted):
    return [0.0 for _ in completions]


class Options:
    pass


def make_tool(described="the first."):
    def add(a: int, b: int) -> int:
        return a + b

    add.__doc__ = f"Add two numbers.\n\nArgs:\n    a: {described}\n    b: the second.\n"
    return add


def digest(**changes):
    [task] = prepare_tasks(EvalTask(**{"reward_fn": good, **FIELDS, **changes}))
    return task.digest


def env_digest(**changes):
    [task] = prepare_tasks(EvalTask(**{"name": "t", "env": "dataset:", "env_options": of_rows(), **changes}))
    return task.digest


def of_rows(**options):
    return {"rows": FIELDS["rows"], "reward_fn": good, **options}


@pytest.mark.parametrize(
    "make",
    [
        lambda: digest(chat={"tools": [make_tool()]}),
        lambda: digest(chat={"chat_template": "x", "marker": Options(), "call": functools.partial(good)}),
        lambda: digest(rows=[{"prompt": "a", "wanted": Options(), "seen": {"b", "a"}, "more": np.arange(3)}]),
        lambda: env_digest(chat={"tools": [make_tool()]}, episodes={"max_turns": 2}),
        lambda: env_digest(env_options=of_rows(reward_fn=functools.partial(good))),
    ],
)
def test_a_digest_holds_no_address(make):
    kept = [make_tool(), Options()]  # so that the next ones lie elsewhere
    first = make()
    kept += [make_tool(), Options()]
    assert make() == first


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (digest(chat={"tools": [make_tool()]}), digest(chat={"tools": [make_tool("another.")]})),
        (digest(chat={"tools": [make_tool()]}), digest(chat={})),
        (
            env_digest(chat={"tools": [make_tool()]}),
            env_digest(chat={"tools": [make_tool("another.")]}),
        ),
        (
            digest(rows=[{"prompt": "a", "wanted": {"b"}}]),
            digest(rows=[{"prompt": "a", "wanted": {"c"}}]),
        ),
        (
            digest(rows=[{"prompt": "a", "wanted": Path("b")}]),
            digest(rows=[{"prompt": "a", "wanted": Path("c")}]),
        ),
        (digest(), digest(correct_from=0.5)),
    ],
)
def test_another_task_has_another_digest(one, other):
    assert one != other


def test_tools_as_schemas_and_as_functions_are_the_same():
    schemas = tool_schemas([make_tool()], tool_functions([make_tool()]))
    assert digest(chat={"tools": schemas}) == digest(chat={"tools": [make_tool()]})
