"""Structured outputs: choices, patterns, Lark, schemas and tags, as texts that are or are not let pass."""

import pytest
from tokenizers import AddedToken

from rollout_engine.grammars.tokenizer_file import serialize_tokenizer
from rollout_engine.grammars.vocabulary import GrammarError, Vocabulary
from rollout_engine.testing import byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENIZER.add_tokens([AddedToken("<call>"), AddedToken("</call>"), AddedToken("<think>")])
OBJECT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ONE = {"at_least_one": True, "stop_after_first": True}
TAGS = [
    {"begin": "<f=a>", "schema": OBJECT, "end": "</f>"},
    {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(serialize_tokenizer(TOKENIZER), 262, [2])


def passes(vocabulary, given, text):
    """Whether an output is complete with this text."""
    matcher = vocabulary.compile(given)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "given, good, bad",
    [
        ({"choice": ['a"b', "ü\n\\", "c"]}, ['a"b', "ü\n\\", "c"], ["a", "", "cc"]),
        ({"regex": r"a/b\d+"}, ["a/b12"], ["a/b", "a\\/b1", "xa/b1"]),
        ({"regex": "a\\/b\nc"}, ["a/b\nc"], ["a/b c"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", ""]),
        ({"json": OBJECT}, ['{"x": 12}', '{"x":1}'], ['{"x": "1"}', "{}", '{"x": 1, "y": 2}']),
        ({"json": '{"enum": [1, "a"]}'}, ["1", '"a"'], ["a", "2"]),
        (
            {"structural_tag": {"structures": TAGS, "triggers": ["<f="]}},
            ["", "hi <f", '<f=a>{"x": 1}</f> and <f=b>null</f>', "<think>so"],
            ["<f=c>", '<f=a>{"x": 1}', "<f=a>null</f>"],
        ),
        (
            {"structural_tag": {"structures": TAGS, "triggers": ["<f="], "at_least_one": True}},
            ["<f=b>null</f>", "<f=b>null</f> and <f=b>null</f>", '<f=a>{"x": 1}</f><think>'],
            ["", "hi", "hi <f=b>null</f>", "<f=b>null</f><f=c>"],
        ),
        (
            {"structural_tag": {"structures": TAGS, "triggers": ["<f="], "stop_after_first": True}},
            ["", "hi", "<think> hi <f=b>null</f>"],
            ["<f=b>null</f>.", "<f=b>null</f><f=b>null</f>"],
        ),
        (
            {
                "structural_tag": {
                    "structures": TAGS,
                    "triggers": ["<f="],
                    "at_least_one": True,
                    "stop_after_first": True,
                }
            },
            ["<f=b>null</f>"],
            ["", " <f=b>null</f>", "<f=b>null</f>."],
        ),
    ],
)
def test_texts_pass_where_they_have_the_form(vocabulary, given, good, bad):
    assert [text for text in good if not passes(vocabulary, given, text)] == []
    assert [text for text in bad if passes(vocabulary, given, text)] == []


def test_a_trigger_that_is_one_token_of_the_tokenizer_binds_as_that_token(vocabulary):
    tag = {"structures": [{"begin": "<call>\n", "schema": OBJECT, "end": "</call>"}], "triggers": ["<call>"]}
    given = {"structural_tag": tag}
    assert passes(vocabulary, given, 'well <call>\n{"x": 1}</call> <think> then <call>\n{"x": 2}</call>')
    assert not passes(vocabulary, given, "<call>\nnull</call>")
    assert not passes(vocabulary, given, '<call>\n{"x": 1}')


def test_a_keyword_that_is_not_enforced_is_refused(vocabulary):
    with pytest.raises(GrammarError, match="uniqueItems"):
        vocabulary.compile({"json": {"type": "array", "uniqueItems": True}})


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(GrammarError, match="byte-level tokenizers"):
        Vocabulary(words.to_str(), 2, [1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": {"type": "a"}}, "Invalid type: a"),
        ({"grammar": 'start: "a" b\n'}, 'at 1(8): unknown name: "b" 1 | start: "a" b ^ 2 |'),
    ],
)
def test_an_error_shows_the_users_text_alone(vocabulary, given, said):
    with pytest.raises(GrammarError) as caught:
        vocabulary.begin(given)
    assert str(caught.value) == said
