"""Conversations under chat templates that keep, rewrite or lack earlier turns."""

import pytest

from rollout_engine.errors import RequestError
from rollout_engine.policy import RolloutPolicy
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.tokenizer import TextCodec
from tests.unit.episodes.playing import Counting, play, row_ids, sampled_turns
from tests.unit.fake_engine import CODEC, make_engine

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_without_a_chat_template_text_is_appended_as_it_is():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    batch = play(RolloutPolicy(make_engine(TextCodec(tokenizer), max_model_len=256)))
    first, second, third = sampled_turns(batch, 0)
    text = batch["text", "prompt"][0]
    expected = CODEC.encode(text) + first
    for said, ids in ((" turn 1: ", second), (" turn 2: ", third)):
        expected += CODEC.encode(said, add_special_tokens=False) + ids
    assert row_ids(batch, 0) == expected


def test_a_template_that_rewrites_is_refused_before_anything_is_sampled(policy):
    with pytest.raises(RequestError, match="on_rewrite='branch'"):
        play(policy, chat_template=FORGETFUL)
    assert not Counting.actions


def test_rewritten_turns_begin_rows_of_their_own(policy):
    batch = play(policy, chat_template=FORGETFUL, on_rewrite="branch", num_episodes=2)
    assert batch["episode_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert [turn[turn >= 0].unique().tolist() for turn in batch["masks", "turn"]] == [[0], [1], [2]] * 2
    assert batch["next", "reward"][0] == batch["next", "reward"][2]


def test_a_chat_template_stands_between_turns(policy):
    batch = play(policy, chat_template=CHAT)
    assert batch["text", "prompt"][0].startswith("<user>begin 0.")
    assert batch["text", "prompt"][0].endswith("</s><assistant>")
    assert "<user> turn 1: </s><assistant>" in batch["text", "response"][0]
    roles = [message["role"] for message in batch["messages"][0]]
    assert roles == ["user", "assistant"] * 3 + ["user"]
