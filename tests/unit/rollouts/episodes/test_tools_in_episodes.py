"""Tools within episodes: whose tool a call names decides who answers it, and the policy reads what was answered."""

from itertools import combinations, permutations

import pytest

from envs_adapters import Observation
from rollout_engine.base.errors import EpisodeError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import CODEC, EOS, make_engine
from tests.unit.rollouts.episodes.playing import play, row_ids, sampled_turns

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARAMS = SamplingParams(max_tokens=240)


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


def sub(a: int, b: int) -> int:
    """Subtracts.

    Args:
        a: the first
        b: the second
    """
    return a - b


class Both(Looks):
    """An environment with a function and a tool that `step` answers."""

    tools = [sub, *Looks.tools]


CALLS = {
    "add": (call("add", '{"a": 1, "b": 2}'), "3"),
    "sub": (call("sub", '{"a": 7, "b": 2}'), "5"),
    "look": (call("look", '{"for": "it"}'), "looked up {'for': 'it'}"),
    "no": (call("no", "{}"), "Error: Unknown tool 'no'. Known: add, look, sub."),
    "broken": ('<tool_call>{"name": "add", "arguments": {</tool_call>', "Error: not JSON: Expecting property name"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "names", [*permutations(("add", "sub", "look")), ("no", "broken", "sub"), *combinations(CALLS, 2)]
)
def test_each_call_of_an_answer_is_made_by_its_owner_and_answered_in_its_place(played, names):
    asked = "".join(CALLS[name][0] for name in names)
    batch, actions = played(Both, [asked, "3"], tools=[add])
    contents = [content for role, content in roles_and_contents(batch) if role == "tool"]
    assert len(contents) == len(names)
    assert all(content.startswith(CALLS[name][1]) for name, content in zip(names, contents, strict=True))
    assert [[each.name for each in action.tool_calls] for action in actions] == [["look"]] * ("look" in names) + [[]]
    assert not any(action.broken_calls for action in actions)
    assert batch["next", "reward"].item() == 1.0 + 0.5 * ("look" in names)


@pytest.mark.parametrize("num_results", [1, 3])
def test_a_step_that_answers_other_calls_than_were_made_fails_its_episode(played, num_results, monkeypatch):
    results = [{"role": "tool", "content": "seen"}] * num_results
    monkeypatch.setattr(Looks, "step", lambda env, action: Observation(list(results)))
    with pytest.raises(EpisodeError, match=f"step answered {num_results} times, and the policy had made 2 calls"):
        played(Looks, [CALLS["look"][0] * 2])


def test_a_name_of_no_tool_does_not_reach_the_environment(played):
    batch, actions = played(Both, [CALLS["no"][0], "3"])
    assert [action.text for action in actions] == ["3"]
    [content] = [content for role, content in roles_and_contents(batch) if role == "tool"]
    assert content == "Error: Unknown tool 'no'. Known: look, sub."


def cat(path: str) -> str:
    """Reads a file.

    Args:
        path: its path
    """
    return {"empty": "", "full": "42"}[path]


@pytest.mark.parametrize("is_own", [True, False])
def test_an_empty_result_is_a_result(played, is_own):
    asked = call("cat", '{"path": "empty"}') + call("cat", '{"path": "full"}')
    env, options = (Asks, {"tools": [cat]}) if is_own else (type("Cats", (Asks,), {"tools": [cat]}), {})
    batch, _ = played(env, [asked, "3"], **options)
    assert roles_and_contents(batch)[2:4] == [("tool", ""), ("tool", "42")]
    assert "<|tool|><eos><|tool|>42<eos>" in CODEC.decode(row_ids(batch, 0))


class SecondBegins(Looks):
    """A game of two, in which seat 1 begins and each answers once; the tool of its own is `look`."""

    num_seats = 2

    def reset(self, seed):
        return Observation("What is 1 + 2?", seat=1)

    def step(self, action):
        self.actions.append(action)
        if action.tool_calls:
            return Observation("It is your turn.", seat=0)
        return Observation("", {action.seat: 1.0}, terminated=True)


def test_the_seat_that_calls_reads_the_result(played):
    batch, actions = played(SecondBegins, [CALLS["add"][0], "3"], tools=[add])
    assert batch["seat"].tolist() == [1] and [action.seat for action in actions] == [1]
    assert roles_and_contents(batch)[2] == ("tool", "3")


def test_results_stay_with_their_seat_if_the_step_passes_the_turn_on(played):
    asked = CALLS["add"][0] + CALLS["look"][0]
    batch, _ = played(SecondBegins, [asked], tools=[add], seats={0: lambda messages: f"I read {len(messages)}"})
    assert roles_and_contents(batch) == [("user", "What is 1 + 2?"), ("assistant", asked), ("tool", "3")]


def test_a_call_drafted_in_thinking_that_the_prompt_has_opened_is_not_made(played):
    thinks = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif")
    batch, [action] = played(Asks, [CALLS["add"][0]], tools=[add], chat_template=thinks, on_rewrite="branch")
    assert not action.tool_calls and not action.broken_calls


IGNORES = TEMPLATE[TEMPLATE.index("{% for m") :]


class Names(Asks):
    """Names the rollout's tool and its parameters in the question, but for the words in `leaves_out`."""

    leaves_out = ""

    def reset(self, seed):
        return f"What is 1 + 2? You may call {'add(a, b)'.replace(self.leaves_out, '')}."


def test_a_prompt_may_show_the_tools_that_its_template_ignores(played):
    batch, _ = played(Names, [CALLS["add"][0], "3"], tools=[add], chat_template=IGNORES)
    assert ("tool", "3") in roles_and_contents(batch)


@pytest.mark.parametrize("word", ["add", "b"])
@pytest.mark.parametrize("is_own", [True, False])
def test_tools_that_neither_the_template_nor_the_prompt_shows_are_refused(played, word, is_own):
    env = type("LeavesOut", (Names,), {"leaves_out": word} | ({} if is_own else {"tools": [add]}))
    with pytest.raises(EpisodeError, match=rf"tools=\['add'\].*ignores tools.*'{word}' is in none"):
        played(env, ["3"], chat_template=IGNORES, **({"tools": [add]} if is_own else {}))


@pytest.mark.parametrize("on_rewrite", ["refuse", "branch"])
def test_tools_under_a_template_that_teaches_no_form_of_calls_need_the_form(played, on_rewrite):
    said = r"tools=\['(add|look)'\].*teaches no form.*Give tool_format='hermes' or"
    with pytest.raises(RequestError, match=said):
        played(Asks, ["3"], tools=[add], tool_format=None, on_rewrite=on_rewrite)
    with pytest.raises(EpisodeError, match=said):
        played(Looks, ["3"], tool_format=None, on_rewrite=on_rewrite)


def test_two_tools_of_one_name_are_refused(played):
    with pytest.raises(EpisodeError, match="both have a tool 'sub': rename one of them"):
        played(Both, ["3"], tools=[sub])


def test_calls_count_as_turns(played):
    batch, actions = played(Asks, [call("add", '{"a": 1, "b": 2}')] * 3, tools=[add], max_turns=3)
    assert batch["ended_by"][0] == "max_turns" and batch["num_turns"].item() == 3 and not actions
    assert batch["next", "truncated"].item() and not batch["next", "terminated"].item()
