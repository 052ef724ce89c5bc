"""The agent of agent_chat.py as a program of OpenAI's Agents SDK, which runs the loop and calls the tool.

    pip install "rollout-engine[agents]"
    OPENAI_BASE_URL=https://... OPENAI_API_KEY=... ROLLOUT_TASK='{"sum": "123+456"}' python examples/agent_sdk.py

`examples/train_agent.py agent_sdk.py` trains the model behind it. It prints the answer.
"""

import json
import os

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

import agent_chat


@function_tool
def calculator(expression: str) -> str:
    """Add whole numbers, such as 1+2."""
    return agent_chat.calculator(expression)


def main() -> None:
    """Answer the task."""
    set_tracing_disabled(True)  # traces would be sent to OpenAI
    agent = Agent(name="adder", model="gpt-4o-mini", tools=[calculator], model_settings=ModelSettings(max_tokens=32))
    result = Runner.run_sync(agent, json.loads(os.environ["ROLLOUT_TASK"])["sum"], max_turns=agent_chat.MAX_TURNS)
    print(result.final_output)


if __name__ == "__main__":
    main()
