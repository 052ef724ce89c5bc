"""Episodes of model families whose tags are tokens: their calls are made, and later turns keep what was sampled."""

import pytest

from rollout_engine.base.errors import EpisodeError, RequestError
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import EOS, make_engine
from tests.unit.rollouts.episodes.playing import play, row_ids, sampled_turns
from tests.unit.rollouts.episodes.test_tools_in_episodes import PARAMS, Asks, add
from tests.unit.text.formats.answers import DSML, codec_with, deepseek, kimi, tags_of
from tests.unit.text.formats.templates import ENDS, TEMPLATES

ASKED = '{"a": 1, "b": 2}'
CALLS = {
    "deepseek": deepseek(f"function<｜tool▁sep｜>add\n```json\n{ASKED}\n```"),
    "kimi": kimi(("functions.add:0", ASKED)),
    "mistral": f"[TOOL_CALLS]add[ARGS]{ASKED}",
    "gemma": "<start_function_call>call:add{a:1,b:2}<end_function_call>",
    "minimax": (
        'hm</think>\n\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "nemotron": f'<TOOLCALL>[{{"name": "add", "arguments": {ASKED}}}]</TOOLCALL>',
}
TO_ADD = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ASKED}<|call|>"
FINAL = "<|channel|>final<|message|>3<|return|>"


@pytest.fixture
def played(monkeypatch):
    """Play one episode of a family in which the policy says these answers: (batch, actions of its steps, tokenizer)."""
    monkeypatch.setattr("tests.unit.fake_engine.VOCAB_SIZE", 300)

    def run(name, answers, *, special=True, **options):
        codec = codec_with([*tags_of(name), *ENDS[name]], special=special)
        scripts = {turn: [*codec.encode(text), EOS] for turn, text in enumerate(answers)}
        Asks.actions = []
        options = {"chat_template": TEMPLATES[name], "tools": [add]} | options
        batch = play(RolloutPolicy(make_engine(codec, max_model_len=2048, scripts=scripts)), Asks, PARAMS, **options)
        return batch, Asks.actions, codec

    return run


@pytest.mark.quick(1)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_family_is_made_and_its_row_goes_on(played, name, special):
    last = "3" if name != "minimax" else "So.</think>3"
    batch, actions, codec = played(name, [CALLS[name], last], special=special)
    assert [message["content"] for message in batch["messages"][0] if message["role"] == "tool"] == ["3"]
    assert batch["num_turns"].tolist() == [2] and len(actions) == 1
    assert [codec.decode(ids[:-1]) for ids in sampled_turns(batch, 0)] == [CALLS[name], last]
    text = codec.decode(row_ids(batch, 0))
    assert f"{CALLS[name]}<eos>" in text and text.count(CALLS[name]) == 1


def test_results_stand_behind_a_message_in_parts_if_the_template_wants_that(played):
    batch, _, _ = played("mistral", [CALLS["mistral"], "3"])
    [answer] = [message for message in batch["messages"][0] if message.get("tool_calls")]
    [result] = [message for message in batch["messages"][0] if message["role"] == "tool"]
    assert answer["content"] == "" and answer["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": {"a": 1, "b": 2},
    }
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"] == "call00000"


def test_channels_are_refused_token_by_token_and_branch_if_asked(played):
    with pytest.raises((EpisodeError, RequestError), match="rewrites what came before"):
        played("harmony", [TO_ADD, FINAL])
    batch, actions, codec = played("harmony", [TO_ADD, FINAL], on_rewrite="branch")
    assert len(batch["episode_id"]) == 2 and len(actions) == 1
    texts = [codec.decode(row_ids(batch, row)) for row in range(2)]
    assert any("<|start|>assistant to=functions.add<|channel|>commentary json" in text for text in texts)


def test_thinking_before_a_call_is_no_call(played):
    drafted = f"<think>I could {CALLS['kimi']}</think>3"
    batch, actions, _ = played("kimi", [drafted])
    assert batch["num_turns"].tolist() == [1] and len(actions) == 1


def test_an_unknown_format_is_refused_and_dsml_is_named(played):
    with pytest.raises(RequestError, match="tool_format='json' is not allowed"):
        played("kimi", ["3"], tool_format="json")
    batch, _, _ = played("kimi", [DSML.replace("x, y", "2"), "3"], tool_format="dsml", special=False)
    assert batch["num_turns"].tolist() == [2]


def test_tools_whose_results_could_follow_no_call_are_refused_before_anything_is_sampled(played, monkeypatch):
    monkeypatch.setattr(Asks, "reset", lambda self, seed: pytest.fail("an episode has begun"))
    template = TEMPLATES["hermes"].replace("{{ m.content }}", "{{ m.content | replace('<tool_call>', '<call>') }}")
    with pytest.raises(RequestError, match="of answers with .*one call.*becomes.*on_rewrite='branch'"):
        played("hermes", ["3"], chat_template=template)


def test_kinds_of_calls_that_would_end_an_episode_are_warned_of(played, caplog):
    batch, _, _ = played("mistral", [CALLS["mistral"], "3"])
    assert not any(batch["error"])
    assert "an answer is thinking before a call end there" in caplog.text


def test_text_forms_stand_in_parts_if_the_template_takes_results_behind_calls_alone(played):
    refuses = (
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('') }}{% endif %}"
    )
    template = TEMPLATES["hermes"].replace("{% for m in messages %}", "{% for m in messages %}" + refuses)
    call = f'<tool_call>\n{{"name": "add", "arguments": {ASKED}}}\n</tool_call>'
    batch, actions, codec = played("hermes", [f"\n{call}", "3"], chat_template=template)
    assert not any(batch["error"]) and batch["num_turns"].tolist() == [2] and len(actions) == 1
    [answer] = [message for message in batch["messages"][0] if message.get("tool_calls")]
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    assert codec.decode(row_ids(batch, 0)).count(call) == 1
