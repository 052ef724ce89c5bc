"""Calls of tools that answers ask for, as environments, episodes and the server take them."""

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool that an answer asks for."""

    name: str
    arguments: dict[str, Any]


class BrokenCall(msgspec.Struct, frozen=True):
    """A part of an answer that was meant as a call, and is none."""

    text: str
    problem: str
