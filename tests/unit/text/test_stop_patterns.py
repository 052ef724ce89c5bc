import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import STOP_REGEX_WINDOW, SamplingParams
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.detokenizer import Detokenizer
from rollout_engine.text.stop_patterns import StopPatterns
from rollout_engine.text.tokenizer import TextCodec

CODEC = TextCodec(byte_tokenizer())
PATTERNS = [
    *("ab", "a+b", "[ab]c", "(?i)BC", "a|bcc", "b$", "^ca", r"\bab\b", "(?<=a)b", "(?<!c)bb", "(?=bc)b", "a(?!b)c"),
    *(r"\s?\b", r".+?(?<=a)\b", r"\s+?(?m:^)\w*", r"\w+?.+?(?<=a)", r"b[^a]*?(?<!b)c?", r"(?P<x>a)(?P=x)", r"\p{Lu}"),
    *("(a|ab)(c|bcc)", r"(a|b)\1c", "c{2,3}a", "a.*c", "a.*?c", "b a", r"\s+a", "(?:ab){2}", "c$|aa"),
]
CATASTROPHE = "(a|aa)+c"


def run(text, chunk=1, **params):
    """(detokenizer, texts seen after each push of `chunk` characters)."""
    made = Detokenizer(CODEC.new_stream(skip_special_tokens=True), SamplingParams(**params))
    ids, seen = CODEC.encode(text), []
    for start in range(0, len(ids), chunk):
        made.push(ids[start : start + chunk])
        seen.append(made.text())
        if made.stop is not None:
            break
    made.finish()
    return made, seen


def found_in_whole(text, patterns, keep):
    """(text, stop) by searching all of the text after each character."""
    for end in range(1, len(text) + 1):
        found = (
            (next((m for m in regex.finditer(p, text[:end], overlapped=True) if m.end()), None), p) for p in patterns
        )
        matches = [(match, pattern) for match, pattern in found if match]
        if matches:
            match, pattern = min(matches, key=lambda found: found[0].start())
            return text[: match.end() if keep else match.start()], pattern
    return text, None


@given(
    text=st.text("abcA \n", max_size=16),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    chunk=st.integers(1, 4),
    keep=st.booleans(),
)
@example(text="xxab", patterns=["ab", "b$"], chunk=2, keep=False)
@settings(max_examples=400)
def test_a_pattern_is_found_as_in_the_whole_text_and_nothing_shown_is_taken_back(text, patterns, chunk, keep):
    made, seen = run(text, chunk, stop_regex=patterns, include_stop_str_in_output=keep)
    assert (made.text(), made.stop) == found_in_whole(text, patterns, keep)
    assert all(made.text().startswith(early) for early in seen)


def test_text_that_may_become_a_match_is_held_back_and_other_text_is_not():
    made, seen = run("x12 y12 apples", stop_regex=[r"\d+ apples"])
    assert seen[:6] == ["x", "x", "x", "x", "x12 y", "x12 y"]
    assert (made.text(), made.stop) == ("x12 y", r"\d+ apples")
    assert run("x12", stop_regex=[r"\d+ apples"])[0].text() == "x12"


@pytest.mark.parametrize("beyond, is_found", [(0, True), (2, False)])
def test_matches_as_long_as_the_window_are_found_and_longer_ones_are_not(beyond, is_found):
    match = "a" + "b" * (STOP_REGEX_WINDOW - 2 + beyond) + "c"
    made, _ = run("x" * 3000 + match, stop_regex=["ab*c"])
    assert (made.stop is not None) == is_found
    assert made.text() == "x" * 3000 + ("" if is_found else match)


def test_a_search_reads_little_but_new_text():
    patterns, num_read = StopPatterns([r"\n\nUser:", "</answer>"]), []
    text = "lorem ipsum " * 250
    for end in range(1, len(text)):
        patterns.search(text[:end], 1)
        num_read.append(end - patterns.held_from)
    assert max(num_read) == 0


def test_matches_that_end_before_min_tokens_do_not_count():
    made, seen = run("a.b.c.", stop_regex=[r"\."], min_tokens=3)
    assert (made.text(), made.stop) == ("a.b", r"\.")
    assert all("a.b".startswith(early) for early in seen)


def test_a_stop_string_at_the_same_token_goes_first():
    assert run("xab", stop_regex=["a+b"], stop=["b"])[0].stop == "b"
    assert run("xab", stop_regex=["a+"], stop=["b"])[0].stop == "a+"


def test_a_pattern_that_explodes_ends_its_sample_with_an_error_and_no_other():
    made, _ = run("x" + "a" * 60, stop_regex=["never", CATASTROPHE])
    assert made.stop is None
    assert "stop_regex='(a|aa)+c' took more than 0.5 s of computing" in made.error


@pytest.mark.parametrize(
    "pattern, words",
    [
        ("(", "a regular expression"),
        ("a*", "does not match the empty text"),
        ("$", "does not match the empty text"),
        ("", "strings of 1 to 1024"),
        ("(" * 600, "a regular expression"),
        ("a" * 1025, "strings of 1 to 1024"),
        (r"\L<words>", "a regular expression"),
    ],
)
def test_patterns_are_checked_at_the_door(pattern, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(stop_regex=[pattern])


def test_one_pattern_may_be_given_as_text_and_needs_text_to_search():
    assert SamplingParams(stop_regex="a+").stop_regex == ["a+"]
    with pytest.raises(RequestError, match="stop_regex=.* must be absent when detokenize=False"):
        SamplingParams(stop_regex="a+", detokenize=False)
