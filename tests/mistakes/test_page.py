"""The page of mistakes says what the engine says."""

import pytest

from tests.mistakes.rows import MISTAKES
from tests.mistakes.table import PAGE, page, rows, scene


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    with scene(tmp_path_factory.mktemp("scene")) as names:
        yield rows(MISTAKES, names)


def test_there_are_forty_and_each_has_an_answer(table):
    assert len(table) >= 40
    assert [row.code for row in table if not row.answer] == []


def test_answers_are_whole_sentences_of_our_own(table):
    """None is an accident of Python's: a TypeError or KeyError from somewhere inside."""
    accidents = ("TypeError", "KeyError", "IndexError", "AssertionError", "RuntimeError", "UnboundLocalError")
    assert [row for row in table if row.answer.startswith(accidents)] == []


def test_the_page_says_what_is_said_today(table):
    assert PAGE.read_text(encoding="utf-8") == page(table), (
        "run `python -m tests.mistakes --write` and read what changed"
    )
