"""Tools within episodes: whose tool a call names decides who answers it, and the policy reads what was answered."""

import pytest

from envs_adapters import Observation
from rollout_engine.policy import RolloutPolicy
from rollout_engine.sampling_params import SamplingParams
from tests.unit.episodes.playing import play, row_ids, sampled_turns
from tests.unit.fake_engine import CODEC, EOS, make_engine

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARAMS = SamplingParams(max_tokens=160)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(text: str) -> str:
    """Fails.

    Args:
        text: a text
    """
    raise ValueError(text)


def call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Asks:
    """One question; records the answer. Its tools, where it has some, are answered by `step`."""

    actions: list

    def reset(self, seed):
        return "What is 1 + 2?"

    def step(self, action):
        self.actions.append(action)
        if action.tool_calls:
            return Observation([{"role": "tool", "content": f"looked up {action.tool_calls[0].arguments}"}], 0.5)
        return Observation(reward=float(action.text == "3"), terminated=True)


class Looks(Asks):
    """An environment with a tool of its own, which `step` answers."""

    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]


@pytest.fixture
def played():
    """Play one episode in which the policy says these answers; returns its batch and the actions of its steps."""

    def run(env, answers, **options):
        scripts = {turn: [*CODEC.encode(text), EOS] for turn, text in enumerate(answers)}
        engine = make_engine(CODEC, max_model_len=1024, scripts=scripts)
        env.actions = []
        options = {"chat_template": TEMPLATE, "tool_format": "hermes"} | options
        batch = play(RolloutPolicy(engine), env, PARAMS, **options)
        assert not engine.core.has_unfinished_requests() and len(engine.frontend.streams) == 0
        said = [CODEC.decode(ids[:-1]) for ids in sampled_turns(batch, 0)]
        assert said == list(answers)
        return batch, env.actions

    return run


def roles_and_contents(batch):
    return [(message["role"], message["content"]) for message in batch["messages"][0]]


def test_a_function_of_the_rollout_answers_and_the_environment_sees_only_the_last_answer(played):
    asked = call("add", '{"a": 1, "b": 2}')
    batch, actions = played(Asks, [asked, "3"], tools=[add])
    assert [action.text for action in actions] == ["3"]
    assert batch["next", "reward"].item() == 1.0 and batch["ended_by"][0] == "terminated"
    assert batch["rewards", "turn"].tolist() == [[0.0, 1.0]]
    text = CODEC.decode(row_ids(batch, 0))
    assert text == (f"[add]<|user|>What is 1 + 2?<eos><|assistant|>{asked}<eos><|tool|>3<eos><|assistant|>3<eos>")
    trained = batch["tokens", "full"][0][batch["masks", "all_assistant_mask"][0]].tolist()
    assert CODEC.decode(trained) == f"{asked}<eos>3<eos>"


def test_an_environments_own_tool_goes_to_its_step(played):
    batch, actions = played(Looks, [call("look", '{"for": "it"}'), "3"])
    assert [[each.name for each in action.tool_calls] for action in actions] == [["look"], []]
    assert batch["rewards", "turn"].tolist() == [[0.5, 1.0]]
    assert ("tool", "looked up {'for': 'it'}") in roles_and_contents(batch)


def test_tools_of_both_are_shown_and_told_apart(played):
    answers = [call("add", '{"a": 1, "b": 2}'), call("look", "{}"), "3"]
    batch, actions = played(Looks, answers, tools=[add])
    assert CODEC.decode(row_ids(batch, 0)).startswith("[add][look]<|user|>")
    assert [len(action.tool_calls) for action in actions] == [1, 0]
    assert [content for role, content in roles_and_contents(batch) if role == "tool"] == ["3", "looked up {}"]


def test_several_calls_of_one_answer_are_answered_in_their_order(played):
    both = call("add", '{"a": 1, "b": 2}') + call("add", '{"a": 5, "b": 5}')
    batch, _ = played(Asks, [both, "3"], tools=[add])
    assert [content for role, content in roles_and_contents(batch) if role == "tool"] == ["3", "10"]


PROBLEMS = {
    "an unknown tool": (call("ad", "{}"), "Error: Unknown tool 'ad'. Did you mean 'add'?"),
    "a wrong argument": (call("add", '{"a": "x", "b": 1}'), "Error: add: Expected `int`, got `str`"),
    "a tool that raises": (call("fail", '{"text": "boom"}'), "Error: ValueError: boom"),
}


@pytest.mark.parametrize("asked, answer", PROBLEMS.values(), ids=PROBLEMS)
def test_a_call_that_fails_is_answered_with_the_reason(played, asked, answer):
    batch, _ = played(Asks, [asked, "3"], tools=[add, fail])
    [told] = [content for role, content in roles_and_contents(batch) if role == "tool"]
    assert told.startswith(answer)
    assert batch["next", "reward"].item() == 1.0


def test_a_broken_call_stays_text_and_is_flagged(played):
    broken = '<tool_call>{"name": "add", "arguments": {</tool_call>'
    batch, [action] = played(Asks, [broken], tools=[add])
    assert action.text == broken and not action.tool_calls
    assert len(action.broken_calls) == 1
    assert batch["next", "reward"].item() == 0.0


def test_calls_count_as_turns(played):
    batch, actions = played(Asks, [call("add", '{"a": 1, "b": 2}')] * 3, tools=[add], max_turns=3)
    assert batch["ended_by"][0] == "max_turns" and batch["num_turns"].item() == 3 and not actions
    assert batch["next", "truncated"].item() and not batch["next", "terminated"].item()
