"""The agent of agent_chat.py over OpenAI's Responses API: its conversation is a list of items.

    OPENAI_BASE_URL=https://... OPENAI_API_KEY=... ROLLOUT_TASK='{"sum": "123+456"}' python examples/agent_responses.py

`examples/train_agent.py agent_responses.py` trains the model behind it. It prints the answer.
"""

import json
import os
import urllib.request
from typing import Any

from agent_chat import MAX_TURNS, PARAMETERS, calculator

TOOL = {"type": "function", "name": "calculator", "description": "Add.", "parameters": PARAMETERS}


def ask(items: list[Any]) -> list[Any]:
    """The items of the model's next answer."""
    body = {"model": "gpt-4o-mini", "input": items, "tools": [TOOL], "max_output_tokens": 32, "store": False}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/responses",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["output"]


def main() -> None:
    """Answer the task, with the calculator as often as the model asks for it."""
    items: list[Any] = [{"role": "user", "content": json.loads(os.environ["ROLLOUT_TASK"])["sum"]}]
    for _ in range(MAX_TURNS):
        answer = ask(items)
        items += answer
        calls = [item for item in answer if item["type"] == "function_call"]
        if not calls:
            break
        for call in calls:
            result = calculator(json.loads(call["arguments"]).get("expression", ""))
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
    print("".join(part["text"] for item in answer if item["type"] == "message" for part in item["content"]))


if __name__ == "__main__":
    main()
