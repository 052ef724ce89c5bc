"""Masks of a grammar: exactly the tokens by which the output can still become what it has to be."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import regex
import torch

from rollout_engine.grammars import masks
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.grammars.masks import GrammarState, begin_masks, forbid
from rollout_engine.grammars.vocabulary import GrammarError
from rollout_engine.testing import byte_tokenizer

TOKENIZER = byte_tokenizer()
END, STOP = 2, 30
PROMPT = [5, 6, 7]
PATTERNS = [
    "[0-9]{2,4}(,[0-9]{1,2})*",
    "(ab|a(bc)?d)+",
    "x*y?z",
    "a/b\\/c\\.[^d-~]",
    '"(\\\\["n]|[^"\\\\])*"',
    "(no|yes)\n",
]


@pytest.fixture
def compiler(vocabulary):
    made = GrammarCompiler(lambda: vocabulary)
    yield made
    made.close()


def state_of(compiler, pattern, stop_ids=(END, STOP)):
    return GrammarState(compiler.grammar({"regex": pattern}), len(PROMPT), stop_ids)


def allowed(mask):
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def text_of(token_ids):
    return TOKENIZER.backend_tokenizer.decode(token_ids, skip_special_tokens=False)


ASCII = [token_id for token_id in range(3, 259) if token_id != STOP and text_of([token_id]).isascii()]


def expected(pattern, output):
    """The verdict of the `regex` package on each next character; an end where the output matches."""
    text = text_of(output)
    next_ones = {t for t in ASCII if regex.fullmatch(pattern, text + text_of([t]), partial=True)}
    return next_ones | ({END, STOP} if regex.fullmatch(pattern, text) else set())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_allows_what_can_still_match_and_an_end_where_it_does(compiler, pattern):
    rng = random.Random(0)
    for _ in range(5):
        state, tokens = state_of(compiler, pattern), list(PROMPT)
        for _ in range(12):
            found = allowed(state.mask(tokens))
            assert found & {*ASCII, END, STOP} == expected(pattern, tokens[len(PROMPT) :])
            going_on = sorted(found & set(ASCII))
            if not going_on:
                break
            tokens.append(rng.choice(going_on))


def test_masks_behind_a_draft_are_those_of_its_tokens_and_change_no_later_one(compiler):
    pattern, rng = PATTERNS[0], random.Random(1)
    state, tokens = state_of(compiler, pattern), list(PROMPT)
    for _ in range(20):
        draft = [rng.choice(TOKENIZER.encode("0123,,,x") + [END]) for _ in range(4)]
        anew = state_of(compiler, pattern)
        state.fill(tokens, draft)
        for end in range(len(draft) + 1):
            if not set(draft[:end]) <= allowed(anew.mask(tokens)) | set(ASCII):
                break  # behind an end, and behind what cannot come, any mask will do
            try:
                at_once = state_of(compiler, pattern).mask(tokens + draft[:end])
            except GrammarError:
                break
            assert np.array_equal(state.mask(tokens, draft[:end]), at_once)
            if END in draft[:end]:
                break
        going_on = sorted(allowed(state.mask(tokens)) & set(ASCII))
        tokens.append(rng.choice(going_on))


def test_a_state_made_anew_from_the_tokens_is_the_same(compiler):
    """The state is rebuilt as behind preemption, or at another replica behind a crash."""
    rng, state, tokens = random.Random(2), state_of(compiler, PATTERNS[1]), list(PROMPT)
    for _ in range(10):
        mask = state.mask(tokens)
        assert np.array_equal(state_of(compiler, PATTERNS[1]).mask(tokens), mask)
        tokens.append(rng.choice(sorted(allowed(mask) & set(ASCII))))


def test_behind_its_end_a_sequence_fails_nothing(compiler):
    state, tokens = state_of(compiler, "ab"), [*PROMPT, *TOKENIZER.encode("ab")]
    assert allowed(state.mask(tokens)) == {END, STOP}
    assert len(allowed(state.mask([*tokens, STOP]))) >= 259  # with async scheduling that row is computed, and dropped


def test_a_token_that_the_grammar_does_not_allow_is_named(compiler):
    state = state_of(compiler, "ab")
    with pytest.raises(GrammarError, match=f"token {TOKENIZER.encode('x')[0]} is not allowed"):
        state.mask([*PROMPT, *TOKENIZER.encode("ax")])


def test_masks_computed_ahead_are_those_computed_when_asked_for(compiler):
    tokens = [*PROMPT, *TOKENIZER.encode("12")]
    states = [state_of(compiler, pattern) for pattern in (PATTERNS[0], "[0-9]+x")]
    begin_masks(compiler.mask_thread, [(state, tokens, TOKENIZER.encode("3")) for state in states])
    for state, pattern in zip(states, (PATTERNS[0], "[0-9]+x"), strict=True):
        assert np.array_equal(state.mask(tokens), state_of(compiler, pattern).mask(tokens))
        assert allowed(state.mask(tokens, TOKENIZER.encode("3"))) & set(ASCII)


def test_a_grammar_that_does_not_compile_fails_the_sequence_alone(compiler):
    with pytest.raises(GrammarError, match="unclosed group"):
        state_of(compiler, "(a").mask(PROMPT)
    assert allowed(state_of(compiler, "a").mask(PROMPT))


def test_the_same_grammar_is_compiled_once(compiler):
    first = compiler.grammar({"json": {"type": "object", "properties": {"a": True, "b": True}}})
    assert compiler.grammar({"json": {"type": "object", "properties": {"a": True, "b": True}}}) is first
    other_order = {"json": {"type": "object", "properties": {"b": True, "a": True}}}
    assert compiler.grammar(other_order) is not first


def test_forbidden_tokens_get_no_logit():
    masks = [np.array([1 << 3, 1 << 7], np.uint32), np.array([0xFFFFFFFF, 0], np.uint32)]
    forbid(logits := torch.zeros(2, 40), masks)
    assert [(row > -torch.inf).nonzero()[:, 0].tolist() for row in logits] == [[3, 39], list(range(32))]


def test_behind_a_slow_call_each_mask_is_timed_and_a_slow_one_fails_its_sequence_alone(compiler, monkeypatch):
    tokens, later = list(PROMPT), [*PROMPT, *TOKENIZER.encode("1")]
    fast, slow = state_of(compiler, "[0-9]+"), state_of(compiler, "[0-9]*")
    wall, computed = iter([0.0, 0.2]), iter([0.0, 0.01, 1.0, 1.7])
    clocks = SimpleNamespace(perf_counter=lambda: next(wall), thread_time=lambda: next(computed))
    monkeypatch.setattr(masks, "time", clocks)
    for known in (tokens, later):
        begin_masks(compiler.mask_thread, [(fast, known, []), (slow, known, [])])
        assert allowed(fast.mask(known)) & set(ASCII) == set(TOKENIZER.encode("0123456789"))
    with pytest.raises(GrammarError, match=r"took 0\.7 s to find"):
        slow.mask(later)
