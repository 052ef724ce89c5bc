"""The reward of a run: from a function of the user's, from the run itself, or from the rows of its session."""

import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.base.errors import RewardError
from rollout_engine.batches.reward_functions import is_reward
from rollout_engine.rollouts.agents.agent import Agent, reward_parameters
from rollout_engine.sessions.rows import SessionRow


def judge(agent: Agent, arguments: Mapping[str, Any]) -> float:
    """The value of the agent's reward function for these arguments, of which it gets those that it names.

    Raises its errors, and `RewardError` if the value is no reward.
    """
    assert agent.reward is not None
    parameters = reward_parameters(agent.reward)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    given = {name: value for name, value in arguments.items() if takes_all or name in names}
    return as_reward(agent.reward(**given), "reward= returned")


def printed_reward(output: str) -> float | None:
    """The reward in the last line of an output, `{"reward": 1.0}`; None: it is another line. Raises `RewardError`."""
    lines = output.rstrip().rsplit("\n", 1)
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "reward" not in value:
        return None
    return as_reward(value["reward"], "its last line gives the reward")


def have_rewards(rows: Sequence[SessionRow]) -> bool:
    """Whether rewards were set on the session or its rows."""
    return any(row.reward is not None for row in rows)


def as_reward(value: Any, where: str) -> float:
    """A number as a float. Raises `RewardError`, which begins `where`, for anything but a finite one."""
    plain = value.item() if hasattr(value, "item") else value  # scalars of numpy and torch
    if not isinstance(plain, numbers.Real) or not _is_finite(plain):
        raise RewardError(f"{where} {value!r:.80}, not a number that is finite in float32.")
    return float(plain)


def _is_finite(number: numbers.Real) -> bool:
    try:
        return is_reward(float(number))
    except OverflowError:  # an int
        return False
