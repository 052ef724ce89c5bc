"""The tokens of two checkpoints are compared by their tokenizer.json."""

import json

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.vocabulary import first_difference

BYTE_PAIRS = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 3, "content": "<end>"}]}
UNIGRAM = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}, "added_tokens": [{"id": 3, "content": "<end>"}]}


@pytest.fixture
def write(tmp_path):
    """write(name, content) -> a directory with that tokenizer.json; None: without."""

    def make(name, content):
        directory = tmp_path / name
        directory.mkdir()
        if content is not None:
            (directory / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return directory

    return make


def test_equal_tokens_do_not_differ_however_they_are_stored(write):
    assert first_difference(write("one", BYTE_PAIRS), write("two", UNIGRAM)) is None


@pytest.mark.parametrize(
    ("added", "what"),
    [
        ([{"id": 3, "content": "<stop>"}], "its token 3 is '<end>', the model's '<stop>'"),
        ([], "its token 3 is '<end>', the model's None"),
        ([{"id": 1, "content": "B"}], "its token 1 is 'b', the model's 'B'"),
    ],
)
def test_the_first_token_that_differs_is_named(write, added, what):
    other = BYTE_PAIRS | {"added_tokens": added}
    assert first_difference(write("one", BYTE_PAIRS), write("two", other)) == what


def test_without_the_file_nothing_is_compared(write):
    assert first_difference(write("one", BYTE_PAIRS), write("two", None)) is None


def test_a_file_that_is_no_json_is_refused(write):
    with pytest.raises(ConfigError, match="tokenizer.json is not valid JSON"):
        first_difference(write("one", "{"), write("two", BYTE_PAIRS))
