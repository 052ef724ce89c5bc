"""Tags of thinking in token ids: of tokenizers that have them as tokens, and of those that spell them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.thinking_tags import ThinkingTags
from rollout_engine.text.tokenizer import TextCodec

PARAMS = SamplingParams(thinking_budget=4)


def with_tokens(*words):
    """A tokenizer of bytes, with some tokens of several."""
    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {word: 1 + max(vocab.values()) + number for number, word in enumerate(words)}
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content))))


@pytest.fixture(scope="module")
def codec():
    return TextCodec(byte_tokenizer())


def test_a_tag_that_was_added_is_its_token_alone(codec):
    hf = byte_tokenizer()
    hf.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    added = TextCodec(hf)
    tags = ThinkingTags(added, len(hf))
    budget = tags.budget_of(PARAMS, added.encode("a<think>\nb"))
    assert (budget.budget, budget.is_open) == (4, True)
    assert budget.closing == [hf.convert_tokens_to_ids("</think>")]
    assert budget.end.moves == {budget.closing[0]: [1]}
    spelled = codec.encode("</think>", add_special_tokens=False)
    assert not tags.budget_of(PARAMS, [*added.encode("<think>"), *spelled, budget.closing[0]]).is_open
    assert tags.budget_of(PARAMS, [*added.encode("<think>"), *spelled]).is_open


@pytest.mark.parametrize(
    "prompt, is_open",
    [
        ("plain", False),
        ("<think>", True),
        ("<think>a</think>", False),
        ("<<think>", True),
        ("<thin<think>a</thin</thi<</think> b", False),
        ("<think>a</think><think>", True),
        ("<think >", False),
    ],
)
def test_a_tag_is_recognised_by_its_bytes(codec, prompt, is_open):
    tags = ThinkingTags(codec, len(codec.hf))
    budget = tags.budget_of(PARAMS, codec.encode(prompt, add_special_tokens=False))
    assert budget.is_open == is_open
    assert codec.decode(budget.closing) == "</think>"
    assert budget.problem() == ""


@pytest.mark.parametrize(
    "spelling",
    [["</", "think", ">"], [".</", "think", ">\n"], ["x<", "/think>y"], [".", "</think>"], ["<", "/", "think", ">"]],
)
def test_every_spelling_of_a_tag_closes(spelling):
    codec = with_tokens("</", "think", ">\u010a", ".</", "x<", "/think>y", "</think>")
    vocab = codec.hf.get_vocab()
    tags = ThinkingTags(codec, len(codec.hf))
    ids = [vocab[part.replace("\n", "\u010a")] for part in spelling]
    opened = codec.encode("<think>", add_special_tokens=False)
    assert not tags.budget_of(PARAMS, [*opened, *ids]).is_open
    assert tags.budget_of(PARAMS, [*opened, *ids[:-1]]).is_open


def test_a_budget_without_its_tags_is_refused_by_name(codec):
    with pytest.raises(RequestError, match="thinking_budget=4 .*skip_tokenizer_init") as refused:
        ThinkingTags(None, 259).check(PARAMS)
    assert refused.value.field == "thinking_budget"
    small = ThinkingTags(codec, 100)  # a model whose vocabulary ends before most bytes
    for field in ("thinking_start", "thinking_end"):
        other = {"thinking_start": "#", "thinking_end": "%"} | {field: "\N{SNOWMAN}"}
        with pytest.raises(RequestError, match="a text that the tokenizer has tokens for") as refused:
            small.check(SamplingParams(thinking_budget=1, **other))
        assert refused.value.field == field
    ThinkingTags(None, 259).check(SamplingParams(thinking_end="anything"))


@pytest.mark.parametrize(
    "given, field",
    [
        (dict(thinking_budget=-2), "thinking_budget"),
        (dict(thinking_budget=True), "thinking_budget"),
        (dict(thinking_budget=1, thinking_end=""), "thinking_end"),
        (dict(thinking_budget=1, thinking_start="x" * 65), "thinking_start"),
        (dict(thinking_budget=1, thinking_start="x", thinking_end="x"), "thinking_end"),
        (dict(thinking_budget=1, structured_outputs={"regex": "a+"}), "thinking_budget"),
    ],
)
def test_bounds_are_checked(given, field):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**given)
    assert refused.value.field == field


def test_minus_one_is_no_budget():
    assert SamplingParams(thinking_budget=-1).thinking_budget is None


@settings(max_examples=30, deadline=None)
@given(
    tag=st.text("ab", min_size=1, max_size=5),
    words=st.lists(st.text("abc", min_size=2, max_size=4), max_size=6, unique=True),
    data=st.data(),
)
def test_the_table_follows_any_spelling_as_a_search_in_its_text_does(tag, words, data):
    """Up to the first time, behind which a tag is closed."""
    codec = with_tokens(*words)
    vocab = codec.hf.get_vocab()
    tags = ThinkingTags(codec, len(codec.hf))
    end = tags.budget_of(SamplingParams(thinking_budget=1, thinking_start="!", thinking_end=tag), []).end
    parts = data.draw(st.lists(st.sampled_from(["a", "b", "c", *words]), max_size=12))
    states = end.states(vocab[part] for part in parts)
    for count, state in enumerate(states, 1):
        text = "".join(parts[:count])
        found = tag in text
        longest = max(size for size in range(len(tag) + 1) if text.endswith(tag[:size]))
        assert state == (len(tag) if found else longest)
    assert (states[-1:] == [len(tag)]) == (tag in "".join(parts))
