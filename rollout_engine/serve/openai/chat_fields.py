"""Fields that tell how a conversation becomes a prompt: `rollout_engine.text.conversations.ChatOptions`, as JSON."""

from typing import Any

import msgspec

from rollout_engine.text.conversations import CHAT_KEYS


def chat_options(body: msgspec.Struct) -> dict[str, Any]:
    """The options of the chat template that a body gives."""
    return {name: value for name in CHAT_KEYS if (value := getattr(body, name)) not in (None, [])}
