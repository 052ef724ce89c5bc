"""A session whose answers are written by the test."""

import random

import numpy as np
import pytest

from rollout_engine.base.outputs import CompletionOutput, VersionSpan
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.sessions.limits import SessionLimits
from rollout_engine.sessions.prompts import PromptCache
from rollout_engine.sessions.session import Session
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.tokenizer import TextCodec

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} by <tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}")
"""A template that leaves out thinking within earlier answers."""
EOS = 2


class Talk:
    """Plays an agent and its model: `ask` gets an answer, and `check` compares the rows with all answers."""

    def __init__(self, codec, **limits):
        self.codec, self.prompts = codec, PromptCache(codec)
        self.session = Session("s", "key", limits=SessionLimits(**limits), now=0.0)
        self.sampled, self.draw = [], random.Random(0)
        self.asked = []

    def place(self, messages, *, now=1.0, n=1, max_tokens=None, **options):
        params = SamplingParams(n=n, max_tokens=max_tokens, logprobs=0)
        return self.session.place(messages, self.prompts.find(options), now=now, params=params)

    def answer(self, place, said, *, finish_reason="stop", **message):
        """Record an answer whose sampled text is `said`; returns the message that the client gets."""
        ids = self.codec.encode(said, add_special_tokens=False) + ([EOS] if finish_reason == "stop" else [])
        logprobs = np.array([-self.draw.random() for _ in ids], np.float32)
        sample = CompletionOutput(
            *(0, said, ids, logprobs, None, None, None, finish_reason, None, [VersionSpan(0, len(ids), 3, 3)], 7),
        )
        message = {"role": "assistant", "content": said, **message}
        self.session.record(place, [sample], [message])
        self.sampled.append((place.prompt_token_ids, sample))
        return message

    def ask(self, messages, said, *, message=None, **options):
        """One request and its answer: the conversation with it."""
        place = self.place(messages, **options)
        answer = self.answer(place, said, **(message or {}))
        self.session.cancel(place)
        self.asked.append(place)
        return [*messages, answer]

    def text(self, row):
        return self.codec.decode(row.prompt_token_ids + row.response)

    @property
    def began(self):
        return [(row.began, row.parent_row) for row in self.session.rows()]

    def check(self):
        """Every answer stands once in the rows, behind its own prompt, with its log-probs."""
        found = []
        for row in self.session.rows():
            assert len(row.response) == len(row.mask) == len(row.turns)
            assert sum(row.mask) == sum(len(sample.token_ids) for _, sample in row.samples)
            for start, sample in row.samples:
                end = start + len(sample.token_ids)
                assert row.response[start:end] == sample.token_ids and all(row.mask[start:end])
                [turn] = set(row.turns[start:end])
                found.append((turn, row.prompt_token_ids + row.response[:start], sample))
        found.sort(key=lambda each: each[0])
        assert [turn for turn, _, _ in found] == list(range(len(self.sampled)))
        for (_, prompt, sample), (was, sampled) in zip(found, self.sampled, strict=True):
            assert prompt == was and sample is sampled


@pytest.fixture(scope="package")
def codec():
    hf = byte_tokenizer()
    hf.chat_template = TEMPLATE
    return TextCodec(hf)


@pytest.fixture
def talk(codec):
    made = Talk(codec)
    yield made
    made.check()


@pytest.fixture
def new_talk(codec):
    return lambda template=TEMPLATE, **limits: Talk(_codec(template), **limits)


def _codec(template):
    hf = byte_tokenizer()
    hf.chat_template = template
    return TextCodec(hf)
