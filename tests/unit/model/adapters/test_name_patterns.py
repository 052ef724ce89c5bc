"""Patterns of module names fit what peft's regular expressions fit, in linear time."""

import random
import re

import pytest

from rollout_engine.model.adapters.name_patterns import NamePattern, PatternError

NAMES = ["q_proj", "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.down_proj", "layersX1.q_proj", "my_q_proj"]
PATTERNS = [
    "q_proj",
    "layers.1.self_attn.q_proj",
    r"layers\.1.*_proj",
    "(q|k|v)_proj",
    "(?:layers.(?:1|2).self_attn.)q_proj",
    r"layers\.\d{2,}\.[a-z_.]+",
    "^model.*",
    "^q_proj$",
    ".*[^n]_proj",
    "model.(layers.1+.+?)?.*",
    "|x",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_fits_as_in_peft(pattern):
    expected = [bool(re.match(rf"(.*\.)?({pattern})$", name)) for name in NAMES]
    assert [NamePattern(pattern).fits(name) for name in NAMES] == expected


def test_random_patterns_fit_as_in_peft(some_of):
    rng = random.Random(0)

    def atom(depth):
        kinds = ["a", "b", "1", ".", r"\.", "[ab]", "[^a]", "[a-b1]", r"\d", r"\W", "[]a]", "(?:", "(", "^", "$"]
        kind = rng.choice(kinds if depth < 3 else kinds[:-4])
        return kind + (alternatives(depth + 1) + ")" if kind.startswith("(") else "")

    def piece(depth):
        found = atom(depth)
        return found + ("" if found in "^$" else rng.choice([*[""] * 6, "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"]))

    def alternatives(depth):
        return "|".join("".join(piece(depth) for _ in range(rng.randrange(4))) for _ in range(rng.choice([1, 1, 2])))

    for _ in range(some_of(2000)):
        pattern = alternatives(0)
        ours, its = NamePattern(pattern), re.compile(rf"(.*\.)?({pattern})$")
        for _ in range(5):
            name = "".join(rng.choice("ab1..") for _ in range(rng.randrange(8)))
            assert ours.fits(name) == bool(its.match(name)), (pattern, name)


def test_a_pattern_on_which_regular_expressions_hang_is_matched():
    assert not NamePattern("(a|a)*" * 50 + "b").fits("a" * 300)


@pytest.mark.parametrize("pattern, reason", [
    ("(", "not closed"),
    ("a)", "closes what none opened"),
    ("[a", "bracket is not closed"),
    ("*a", "nothing for '.' to repeat"),
    ("^*", "nothing to repeat"),
    ("a**", "without parentheses"),
    ("a{3,2}", "in order"),
    ("a{1000}", "100 times at most"),
    ("a{x}", "a repetition is"),
    (r"(a)\1", "is not read"),
    ("(?=a)b", "no other kind"),
    ("((a{100}){100}){100}", "too large"),
    ("(" * 60 + ")" * 60, "nested"),
    ("a" * 1001, "1001 characters"),
])  # fmt: skip
def test_a_pattern_that_is_not_read_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(PatternError, match=reason):
        NamePattern(pattern)
