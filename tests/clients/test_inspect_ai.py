"""Inspect: an evaluation of two samples by its OpenAI provider, and single answers."""

import asyncio

import pytest

pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402
from inspect_ai.tool import tool  # noqa: E402

CLIENT = "inspect_ai"
PROVIDERS = {"openai": {"responses_api": False}, "openai-api/tiny": {}}


@pytest.fixture(params=list(PROVIDERS))
def model(request, url):
    more = PROVIDERS[request.param]
    return get_model(f"{request.param}/tiny", base_url=f"{url}/v1", api_key="-", memoize=False, **more)


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: The first one.
            y: The second one.
        """
        return x + y

    return execute


def ask(model, prompt="hello", tools=(), **settings):
    return asyncio.run(model.generate(prompt, tools=list(tools), config=GenerateConfig(max_tokens=6, **settings)))


def test_answers_are_the_policys(model, text_of):
    output = ask(model, temperature=1.0, seed=5)
    messages = [{"role": "user", "content": "hello"}]
    assert output.completion == text_of({"messages": messages}, max_tokens=6, temperature=1.0, seed=5)
    assert output.stop_reason == "max_tokens" and output.usage.output_tokens == 6


def test_choices_come_with_log_probs(model):
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "stop_seqs": ["zzz"], "num_choices": 2}
    output = ask(model, logprobs=True, top_logprobs=2, **settings)
    assert len(output.choices) == 2
    for choice in output.choices:
        assert len(choice.logprobs.content) == 6
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_tools_may_be_offered(model):
    assert ask(model, tools=[add()]).stop_reason == "max_tokens"


def test_an_evaluation_is_scored(model, text_of, tmp_path):
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 6}
    answers = [text_of({"messages": [{"role": "user", "content": text}]}, **settings) for text in "ab"]
    samples = [Sample(input="a", target=answers[0][:3]), Sample(input="b", target="not to be found")]
    task = Task(dataset=samples, solver=generate(), scorer=includes(ignore_case=False))
    [log] = eval(task, model=model, log_dir=str(tmp_path), display="none", **settings)
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == answers
    assert [sample.scores["includes"].value for sample in log.samples] == ["C", "I"]
