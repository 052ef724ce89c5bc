"""Environments: their interface, and adapters for the packages that have some."""

from envs_adapters.base import Action, BrokenCall, Env, EnvSpec, Message, Observation, ToolCall
from envs_adapters.families import make_env

__all__ = ["Action", "BrokenCall", "Env", "EnvSpec", "Message", "Observation", "ToolCall", "make_env"]
