"""Masks of a grammar: exactly the tokens by which the output can still become what it has to be."""

import random
import re

import numpy as np
import pytest
import regex
import torch

from rollout_engine.grammars import masks, native
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.grammars.masks import Asked, GrammarBatch, forbid
from rollout_engine.grammars.state import GrammarState
from rollout_engine.grammars.tokenizer_file import serialize_tokenizer
from rollout_engine.grammars.vocabulary import GrammarError, Vocabulary
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


@pytest.fixture(params=["C++", "Python"])
def compiler(request, vocabulary):
    if request.param == "Python":
        vocabulary = Vocabulary(serialize_tokenizer(TOKENIZER), 259, [END])
        vocabulary.native = None
    else:
        assert vocabulary.native is not None
    made = GrammarCompiler(lambda: vocabulary)
    yield made
    made.close()


def state_of(compiler, pattern, stop_ids=(END, STOP)):
    return GrammarState(compiler.grammar({"regex": pattern}), len(PROMPT), stop_ids)


def mask_of(state, tokens, draft=()):
    """The mask behind tokens and a draft. Raises `GrammarError` where the state notes a failure."""
    found, _ = GrammarBatch([Asked(state, tokens, draft)]).masks()
    if state.failure is not None:
        raise GrammarError(state.failure)
    return found[len(draft)]


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


@pytest.mark.quick(5)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_allows_what_can_still_match_and_an_end_where_it_does(compiler, pattern):
    rng = random.Random(0)
    for _ in range(5):
        state, tokens = state_of(compiler, pattern), list(PROMPT)
        for _ in range(12):
            found = allowed(mask_of(state, tokens))
            assert found & {*ASCII, END, STOP} == expected(pattern, tokens[len(PROMPT) :])
            going_on = sorted(found & set(ASCII))
            if not going_on:
                break
            tokens.append(rng.choice(going_on))


FORMS = [
    *({"regex": pattern} for pattern in PATTERNS),
    {"json": {"properties": {"name": {"type": "string"}, "of": {"enum": ["ab", 1]}}, "required": ["name", "of"]}},
    {"choice": ["north", "northwest", "no"]},
    {"grammar": 'start: "a" <[5]> | <[1]> "b"* | /[^x]/'},
]


@pytest.mark.quick(5)
@pytest.mark.parametrize("given", FORMS, ids=lambda given: str(given)[:30])
def test_a_token_is_told_alone_as_the_mask_would_tell_it(compiler, some_of, given):
    """No mask is filled for a token that it would allow; any other token gets the mask."""
    rng = random.Random(0)
    for _ in range(some_of(4)):
        state, tokens = GrammarState(compiler.grammar(given), len(PROMPT), (END, STOP)), list(PROMPT)
        asked = GrammarBatch([Asked(state, tokens)])
        for _ in range(10):
            [mask], [is_filled] = asked.masks()
            found = allowed(mask)
            assert is_filled and state.failure is None
            for token_id in range(259):
                [again], [is_filled] = asked.masks(np.array([token_id]))
                assert is_filled == (token_id not in found)
                assert not is_filled or np.array_equal(again, mask)
            going_on = sorted(found - {END, STOP})
            if not going_on:
                break
            tokens.append(rng.choice(going_on))
    assert len(tokens) > len(PROMPT)


def test_tokens_are_tried_behind_each_token_of_a_draft(compiler):
    state, text = state_of(compiler, "[0-9]+,x"), TOKENIZER.encode
    asked = GrammarBatch(
        [Asked(state, list(PROMPT), text("12,")), Asked(state_of(compiler, "("), list(PROMPT), text("a"))]
    )
    tried = [*text("7x"), -1, *text("x"), *text("aa")]
    masks, is_filled = asked.masks(np.array(tried))
    assert is_filled.tolist() == [False, True, True, False, False, False]
    assert allowed(masks[1]) & set(ASCII) == allowed(masks[2]) & set(ASCII) == set(text("0123456789,"))
    assert state.failure is None


def test_masks_behind_a_draft_are_those_of_its_tokens_and_change_no_later_one(compiler):
    pattern, rng = PATTERNS[0], random.Random(1)
    state, tokens = state_of(compiler, pattern), list(PROMPT)
    for _ in range(20):
        draft = [rng.choice(TOKENIZER.encode("0123,,,x") + [END]) for _ in range(4)]
        anew = state_of(compiler, pattern)
        for end in range(len(draft) + 1):
            if not set(draft[:end]) <= allowed(mask_of(anew, tokens)) | set(ASCII):
                break  # behind an end, and behind what cannot come, any mask will do
            try:
                at_once = mask_of(state_of(compiler, pattern), tokens + draft[:end])
            except GrammarError:
                break
            assert np.array_equal(mask_of(state, tokens, draft[:end]), at_once)
            if END in draft[:end]:
                break
        going_on = sorted(allowed(mask_of(state, tokens)) & set(ASCII))
        tokens.append(rng.choice(going_on))


def test_a_state_made_anew_from_the_tokens_is_the_same(compiler):
    """The state is rebuilt as behind preemption, or at another replica behind a crash."""
    rng, state, tokens = random.Random(2), state_of(compiler, PATTERNS[1]), list(PROMPT)
    for _ in range(10):
        mask = mask_of(state, tokens)
        assert np.array_equal(mask_of(state_of(compiler, PATTERNS[1]), tokens), mask)
        tokens.append(rng.choice(sorted(allowed(mask) & set(ASCII))))


def test_behind_its_end_a_sequence_fails_nothing(compiler):
    state, tokens = state_of(compiler, "ab"), [*PROMPT, *TOKENIZER.encode("ab")]
    assert allowed(mask_of(state, tokens)) == {END, STOP}
    assert (
        len(allowed(mask_of(state, [*tokens, STOP]))) >= 259
    )  # with async scheduling that row is computed, and dropped


def test_a_token_that_the_grammar_does_not_allow_is_named(compiler):
    state = state_of(compiler, "ab")
    with pytest.raises(GrammarError, match=f"token {TOKENIZER.encode('x')[0]} is not allowed"):
        mask_of(state, [*PROMPT, *TOKENIZER.encode("ax")])


def test_masks_of_many_sequences_are_those_of_each_alone(compiler):
    rng, patterns = random.Random(3), [*PATTERNS, "[0-9]+x", "(", PATTERNS[0]]
    states, tokens = [state_of(compiler, pattern) for pattern in patterns], [list(PROMPT) for _ in patterns]
    for _ in range(12):
        drafts = [[rng.choice(ASCII) for _ in range(rng.randrange(4))] for _ in patterns]
        masks = GrammarBatch([Asked(*given) for given in zip(states, tokens, drafts, strict=True)])
        found, _ = masks.masks()
        for state, pattern, known, draft, first in zip(states, patterns, tokens, drafts, masks.firsts, strict=True):
            if state.failure is None:
                alone, _ = GrammarBatch([Asked(state_of(compiler, pattern), known, draft)]).masks()
                assert np.array_equal(found[first : first + len(alone)], alone)
                going_on = sorted(allowed(found[first]) & {*ASCII, STOP})
                known.append(rng.choice(going_on or [STOP]))
    assert [state.failure is None for state in states].count(False) == 1


def test_masks_filled_step_after_step_are_those_of_each_step_alone_while_sequences_end(compiler):
    rng, patterns = random.Random(5), ["[0-9]{2,30}", "a|b{3}", "x{9}", "("]
    states, tokens = [state_of(compiler, pattern) for pattern in patterns], [list(PROMPT) for _ in patterns]
    masks, ended = GrammarBatch([Asked(*both) for both in zip(states, tokens, strict=True)]), set()
    for _ in range(20):
        found, _ = masks.masks()
        for row, (state, pattern, known) in enumerate(zip(states, patterns, tokens, strict=True)):
            if row in ended or state.failure is not None:
                assert (found[row] == 0xFFFFFFFF).all()
                continue
            assert np.array_equal(found[row], GrammarBatch([Asked(state_of(compiler, pattern), known)]).masks()[0][0])
            going_on = sorted(allowed(found[row]) & {*ASCII, STOP})
            known.append(rng.choice(going_on))
            if known[-1] == STOP:
                ended.add(row)
    assert {1, 2} <= ended and [state.failure is not None for state in states] == [False, False, False, True]


def test_cpp_and_python_allow_the_same_tokens_of_json(vocabulary):
    """Texts that a grammar forces come token by token as the tokenizer divides them, which is Python's work in both."""
    other = Vocabulary(serialize_tokenizer(TOKENIZER), 259, [END])
    other.native = None
    person = {"type": "object", "properties": {"name": {"type": "string"}, "of": {"enum": ["ab", "ac", 1]}}}
    given = {"json": person | {"required": ["of"], "additionalProperties": False}}
    pair = []
    for each in (vocabulary, other):
        made = GrammarCompiler(lambda each=each: each)
        pair.append([GrammarState(made.grammar(given), 0, (END,)) for _ in range(20)])
        made.close()
    tokens, rng = [[] for _ in range(20)], random.Random(4)
    both = [GrammarBatch([Asked(*each) for each in zip(states, tokens, strict=True)]) for states in pair]
    for _ in range(60):
        ours, its = (masks.masks()[0] for masks in both)
        assert np.array_equal(ours, its)
        for known, mask in zip(tokens, ours, strict=True):
            known.append(rng.choice(sorted(allowed(mask) & {*ASCII, STOP, END})))
    assert any(END in known for known in tokens)


def test_a_grammar_that_does_not_compile_fails_the_sequence_alone(compiler):
    with pytest.raises(GrammarError, match="unclosed group"):
        mask_of(state_of(compiler, "(a"), PROMPT)
    assert allowed(mask_of(state_of(compiler, "a"), PROMPT))


def test_a_matcher_of_a_sequence_that_ended_begins_anew_for_the_next(compiler):
    first = state_of(compiler, "ab|[0-9]+")
    expected = mask_of(first, PROMPT)
    mask_of(first, [*PROMPT, *TOKENIZER.encode("12")])
    matcher = first.matcher
    first.end()
    other, later = state_of(compiler, "x"), state_of(compiler, "ab|[0-9]+")
    assert allowed(mask_of(other, PROMPT)) & set(ASCII) == set(TOKENIZER.encode("x"))
    assert np.array_equal(mask_of(later, PROMPT), expected)
    assert later.matcher is matcher and other.matcher is not matcher


def test_the_same_grammar_is_compiled_once(compiler):
    first = compiler.grammar({"json": {"type": "object", "properties": {"a": True, "b": True}}})
    assert compiler.grammar({"json": {"type": "object", "properties": {"a": True, "b": True}}}) is first
    other_order = {"json": {"type": "object", "properties": {"b": True, "a": True}}}
    assert compiler.grammar(other_order) is not first


@pytest.mark.parametrize("fault", ["a function is missing", "other tokens are taken"])
def test_without_c_functions_that_agree_python_follows_grammars_and_the_log_says_so(monkeypatch, caplog, fault):
    if fault == "a function is missing":
        monkeypatch.setattr(native, "functions", lambda library: library.llg_matcher_of_no_version)
    else:
        monkeypatch.setattr(native.NativeMatcher, "consume_token", lambda matcher, token_id: False)
    found = Vocabulary(serialize_tokenizer(TOKENIZER), 259, [END])
    assert found.native is None
    [said] = [record.message for record in caplog.records]
    assert said.startswith("Grammars are followed in Python, which is slower, without llguidance's C functions: ")
    made = GrammarCompiler(lambda: found)
    assert allowed(mask_of(state_of(made, "[ab]"), PROMPT)) & set(ASCII) == set(TOKENIZER.encode("ab"))
    made.close()


def test_forbidden_tokens_get_no_logit():
    masks = np.array([[1 << 3, 1 << 7], [0xFFFFFFFF, 0]], np.uint32)
    forbid(logits := torch.zeros(2, 40), masks)
    assert [(row > -torch.inf).nonzero()[:, 0].tolist() for row in logits] == [[3, 39], list(range(32))]


def test_a_slow_mask_fails_its_sequence_alone(compiler, monkeypatch):
    fast, ended, slow = (state_of(compiler, pattern) for pattern in ("[0-9]+", "a", "[0-9]*"))
    tokens = [*PROMPT, *TOKENIZER.encode("1")]
    GrammarBatch([Asked(fast, tokens), Asked(ended, [*PROMPT, END])]).masks()
    monkeypatch.setattr(masks, "MAX_MASK_SECONDS", 0.0)
    found, _ = GrammarBatch([Asked(ended, [*PROMPT, END, END]), Asked(slow, PROMPT)]).masks()
    assert (found == 0xFFFFFFFF).all() and ended.failure is None and fast.failure is None
    assert re.fullmatch(r"the tokens that may come next took 0\.0 s to find: give a simpler grammar", slow.failure)
