"""The agent of agent_chat.py over Anthropic's Messages API: calls and results are blocks of messages.

    ANTHROPIC_BASE_URL=https://... ANTHROPIC_API_KEY=... ROLLOUT_TASK='{"sum": "1+2"}' python examples/agent_messages.py

`examples/train_agent.py agent_messages.py` trains the model behind it. It prints the answer.
"""

import json
import os
import urllib.request
from typing import Any

from agent_chat import MAX_TURNS, PARAMETERS, calculator

TOOL = {"name": "calculator", "description": "Add.", "input_schema": PARAMETERS}


def ask(messages: list[Any]) -> list[Any]:
    """The blocks of the model's next message."""
    body = {"model": "claude-haiku-4-5", "messages": messages, "tools": [TOOL], "max_tokens": 32}
    headers = {
        "Content-Type": "application/json",
        "anthropic-version": "2023-06-01",
        "x-api-key": os.environ["ANTHROPIC_API_KEY"],
    }
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["content"]


def main() -> None:
    """Answer the task, with the calculator as often as the model asks for it."""
    messages: list[Any] = [{"role": "user", "content": json.loads(os.environ["ROLLOUT_TASK"])["sum"]}]
    for _ in range(MAX_TURNS):
        blocks = ask(messages)
        messages.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not calls:
            break
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": calculator(call["input"].get("expression", "")),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    print("".join(block["text"] for block in blocks if block["type"] == "text"))


if __name__ == "__main__":
    main()
