"""Words that a reader of the field would have to translate stay rare in docstrings, comments and errors."""

import re
from collections import Counter

import pytest

from tests.contract.words import words_of

# Pattern -> (words to write instead, how many there may be). Those left are mostly right ("where" of a place),
# or stand in errors. A change that takes some out lowers the number.
ACCENT = {
    r"where": ("if or when, for a condition; of a place, its name", 95),
    r"what": ("the name of the thing: the tensors that ..., the time that ...", 65),
    r"comes?|came": ("arrive, is passed, is received", 42),
    r"(?:go|goes|went|going) on": ("continue, keep", 20),
    r"tells?|told|hears?|heard|knows?|says?": ("return, log, report, notify, record", 45),
    r"besides?": ("concurrently with, in addition to, next to", 18),
    r"nobody|whoever|somebody": ("no caller, the caller that", 5),
    r"so many|by itself|by themselves|in vain|for ever|lets? go of|all the same": (
        "a number, separately, without effect, indefinitely, release, anyway",
        10,
    ),
}


@pytest.fixture(scope="module")
def num_found(package_sources):
    """Pattern -> how often it stands in the words of the packages."""
    found = Counter()
    for source in package_sources:
        for words in words_of(source):
            for pattern in ACCENT:
                found[pattern] += len(re.findall(rf"\b(?:{pattern})\b", words.text, re.IGNORECASE))
    return found


@pytest.mark.parametrize("pattern", ACCENT)
def test_words_to_translate_become_no_more(num_found, pattern):
    instead, most = ACCENT[pattern]
    assert num_found[pattern] <= most, f"write instead: {instead}"
