"""Environments of verifiers 0.3, written as its documentation says; `kind` chooses one."""

import asyncio

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)]


def is_right(completion, answer, **arguments):
    return float(any(message["content"] == answer for message in completion))


def num_answers(state, **arguments):
    return len(state["trajectory"])


class Guessing(vf.MultiTurnEnv):
    """Ends when the answer is right, or after three."""

    async def env_response(self, messages, state, **arguments):
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
            return []
        return [vf.UserMessage(content=f"{len(state['trajectory'])} wrong.")]


class Rewriting(Guessing):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if state["trajectory"] else messages


class Hurried(Guessing):
    async def env_response(self, messages, state, **arguments):
        asked = [self.get_model_response(state, messages) for _ in range(2)]
        await asyncio.gather(*asked)


class Broken(Guessing):
    async def setup_state(self, state):
        raise vf.InfraError("nothing works")


class BrokenLater(Guessing):
    async def env_response(self, messages, state, **arguments):
        raise vf.InfraError("nothing works any more")


KINDS = {
    "guessing": Guessing,
    "rewriting": Rewriting,
    "hurried": Hurried,
    "broken": Broken,
    "broken later": BrokenLater,
}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def of_group(completions, **arguments) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind="single", **options):
    rubric = vf.Rubric(funcs=[is_right, num_answers], weights=[1.0, 0.25])
    options = {"dataset": Dataset.from_list(ROWS), "rubric": rubric, "system_prompt": "Add."} | options
    if kind == "single":
        return vf.SingleTurnEnv(**options)
    if kind == "group":
        return vf.SingleTurnEnv(**options | {"rubric": vf.Rubric(funcs=[of_group])})
    if kind == "evaluation":
        return vf.SingleTurnEnv(eval_dataset=options.pop("dataset"), **options)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], **options)
    kinds = {
        "guessing": Guessing,
        "rewriting": Rewriting,
        "hurried": Hurried,
        "broken": Broken,
        "broken later": BrokenLater,
    }
    return kinds[kind](max_turns=3, **options)
