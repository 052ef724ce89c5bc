"""The agent of agent_chat.py as a program of OpenAI's Agents SDK, which runs the loop and calls the tool.

    pip install "rollout-engine[agents]"
    OPENAI_BASE_URL=https://... OPENAI_API_KEY=... ROLLOUT_TASK='{"sum": "123+456"}' python examples/agent_sdk.py

`examples/train_agent.py agent_sdk.py` trains the model behind it. It prints the answer.
"""

import asyncio
import json
import os
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

import agent_chat

set_tracing_disabled(True)  # traces would be sent to OpenAI


@function_tool(
    strict_mode=False
)  # a grammar would need a tokenizer of bytes, and the made policy has one of characters
def calculator(expression: str) -> str:
    """Add whole numbers, such as 1+2."""
    return agent_chat.calculator(expression)


async def run(task: Any, url: str, key: str) -> str:
    """The answer to a task, with the calculator as often as the model asks for it."""
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        model = OpenAIResponsesModel("gpt-4o-mini", client)
        adder = Agent(name="adder", model=model, tools=[calculator], model_settings=ModelSettings(max_tokens=32))
        result = await Runner.run(adder, task["sum"], max_turns=agent_chat.MAX_TURNS)
    return str(result.final_output)


if __name__ == "__main__":
    task = json.loads(os.environ["ROLLOUT_TASK"])
    print(asyncio.run(run(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
