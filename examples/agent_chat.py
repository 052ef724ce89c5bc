"""An agent that adds two numbers with a calculator, over OpenAI's chat API: it knows nothing of rollout-engine.

    OPENAI_BASE_URL=https://... OPENAI_API_KEY=... ROLLOUT_TASK='{"sum": "123+456"}' python examples/agent_chat.py

`examples/train_agent.py agent_chat.py` trains the model behind it. It prints the answer.
"""

import json
import os
import urllib.request
from typing import Any

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "description": "Add.", "parameters": PARAMETERS}}
MAX_TURNS = 4


def calculator(expression: str) -> str:
    """Add whole numbers."""
    terms = expression.split("+")
    return str(sum(map(int, terms))) if all(term.isdigit() for term in terms) else "?"


def ask(messages: list[Any]) -> dict[str, Any]:
    """The model's next message."""
    body = {"model": "gpt-4o-mini", "messages": messages, "tools": [TOOL], "max_tokens": 32}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def main() -> None:
    """Answer the task, with the calculator as often as the model asks for it."""
    messages: list[Any] = [{"role": "user", "content": json.loads(os.environ["ROLLOUT_TASK"])["sum"]}]
    for _ in range(MAX_TURNS):
        answer = ask(messages)
        messages.append(answer)
        if not answer.get("tool_calls"):
            break
        for call in answer["tool_calls"]:
            result = calculator(json.loads(call["function"]["arguments"]).get("expression", ""))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(answer["content"])


if __name__ == "__main__":
    main()
