"""Environments: their interface, and adapters for the packages that have some."""

from envs_adapters.base import Action, Env, EnvSpec, Message, Observation
from envs_adapters.families import make_env
from rollout_engine.base.tool_call import BrokenCall, ToolCall

__all__ = ["Action", "BrokenCall", "Env", "EnvSpec", "Message", "Observation", "ToolCall", "make_env"]
