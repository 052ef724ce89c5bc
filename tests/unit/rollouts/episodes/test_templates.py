"""Conversations under chat templates that keep, rewrite or lack earlier turns."""

import pytest

from envs_adapters import Observation
from rollout_engine.base.errors import EpisodeError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.tokenizer import TextCodec
from tests.unit.fake_engine import CODEC, EOS, make_engine
from tests.unit.rollouts.episodes.playing import Counting, play, row_ids, sampled_turns

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

KEEPS_WHILE_CALLING = (  # as Qwen3
    "{% set ns = namespace(asked=0) %}{{ tools }}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if loop.index0 < ns.asked else m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
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


def play_thinking(env=Counting, **options):
    """Play an episode whose answers think in the first and second turn, and do not in the third.

    Answers are scripted in the order of the requests, which that of several episodes may not be.
    """
    answers = ["<think>a</think>b", "<think>c</think>d", "e"]
    said = [[*CODEC.encode(text), EOS] for text in answers]
    policy = RolloutPolicy(make_engine(max_model_len=512, scripts=dict(enumerate(said))))
    return play(policy, env, SamplingParams(max_tokens=40), num_episodes=1, **options)


def test_turns_that_are_rewritten_begin_rows_of_their_own():
    batch = play_thinking(chat_template=FORGETFUL, on_rewrite="branch")
    assert batch["episode_id"].tolist() == [0, 0, 0]
    assert [turn[turn >= 0].unique().tolist() for turn in batch["masks", "turn"]] == [[0], [1], [2]]
    assert batch["next", "reward"][0] == batch["next", "reward"][2]
    prompts = batch["text", "prompt"]
    assert prompts[1].endswith("<assistant>b</s><user> turn 1: </s><assistant>")
    assert "<assistant>d</s>" in prompts[2] and "think" not in prompts[2]


def test_turns_without_anything_to_rewrite_share_a_row(policy):
    batch = play(policy, chat_template=FORGETFUL, on_rewrite="branch", num_episodes=2)
    assert batch["episode_id"].tolist() == [0, 1]
    assert batch["num_turns"].tolist() == [3, 3]


class Looks:
    """An environment that answers each turn by a tool's message, and the last but one by a user's too."""

    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]
    asks = False

    def reset(self, seed):
        self.turn = 0
        return "begin"

    def step(self, action):
        self.turn += 1
        asked = [{"role": "user", "content": "and?"}] if self.asks and self.turn == 2 else []
        return Observation([{"role": "tool", "content": f"{self.turn}"}, *asked], 1.0, terminated=self.turn == 3)


class LooksAndAsks(Looks):
    asks = True


def test_thinking_between_calls_stays_in_the_row_of_a_model_that_keeps_it_until_a_user_speaks():
    batch = play_thinking(Looks, chat_template=KEEPS_WHILE_CALLING, tool_format="hermes")
    assert batch["error"][0] is None and batch["num_turns"].tolist() == [3]
    text = CODEC.decode(row_ids(batch, 0))
    assert "<think>a</think>b</s><tool>1</s><assistant><think>c</think>d" in text.replace("<eos>", "")


def test_a_users_message_after_calls_begins_a_row_or_ends_the_episode_with_the_reason():
    options = {"chat_template": KEEPS_WHILE_CALLING, "tool_format": "hermes"}
    batch = play_thinking(LooksAndAsks, on_rewrite="branch", **options)
    assert [turn[turn >= 0].unique().tolist() for turn in batch["masks", "turn"]] == [[0, 1], [2]]
    assert "think" not in batch["text", "prompt"][1]
    with pytest.raises(EpisodeError, match="once tool and user messages follow .* on_rewrite='branch'"):
        play_thinking(LooksAndAsks, **options)


def test_a_template_that_drops_thinking_for_users_is_refused_before_an_episode_without_tools_samples(policy):
    with pytest.raises(EpisodeError, match="once user messages follow .* on_rewrite='branch'"):
        play(policy, chat_template=KEEPS_WHILE_CALLING)
    assert not Counting.actions


def test_messages_of_a_role_that_the_template_leaves_out_end_the_episode(policy):
    drops_tools = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    with pytest.raises(EpisodeError, match="'tool' is not allowed.*leaves the message out"):
        play(policy, Looks, chat_template="{{ tools }}" + drops_tools, tool_format="hermes")


def test_a_chat_template_stands_between_turns(policy):
    batch = play(policy, chat_template=CHAT)
    assert batch["text", "prompt"][0].startswith("<user>begin 0.")
    assert batch["text", "prompt"][0].endswith("</s><assistant>")
    assert "<user> turn 1: </s><assistant>" in batch["text", "response"][0]
    roles = [message["role"] for message in batch["messages"][0]]
    assert roles == ["user", "assistant"] * 3 + ["user"]


def test_a_branch_that_leaves_no_room_for_an_answer_is_no_row(policy):
    numbered = CHAT.replace("<{{ m['role'] }}>", "<{{ m['role'] }} of {{ messages | length }}>")
    options = {"on_rewrite": "branch", "chat_template": numbered, "num_episodes": 1, "num_samples": 1}
    batch = play(policy, max_episode_tokens=100, **options)
    assert set(batch["ended_by"]) == {"max_episode_tokens"}
    assert len(batch) == int(batch["num_turns"][0])  # each turn is a branch
    assert (batch["masks", "turn"] >= 0).any(dim=1).all()
