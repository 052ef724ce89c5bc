"""Answers as the package `renderers` reads them, where it is installed."""

import random

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.tool_call import BrokenCall
from rollout_engine.text.formats.answer import AnswerParts
from rollout_engine.text.formats.choose import answer_format, check_format_name
from tests.unit.text.formats.answers import ADD, HERMES, TOOLS, codec_with, read_in_pieces

pytest.importorskip("renderers")
import httpx  # noqa: E402, F401  # renderers imports it and does not require it
from renderers import config_from_name  # noqa: E402

TAGS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TAGS += ["<tool_response>", "</tool_response>"]


def test_an_answer_is_read_by_its_renderer():
    assert config_from_name("qwen3").name == "qwen3"
    codec = codec_with(TAGS)
    form = answer_format(codec, None, "renderers:qwen3")
    answer = f"<think>\nhm\n</think>\n\nI add.\n{HERMES}<|im_end|>"
    token_ids = codec.encode(answer, add_special_tokens=False)
    parts = AnswerParts("hm", "I add.", [ADD])
    assert form.read(token_ids, answer, tools=TOOLS) == parts
    assert read_in_pieces(form, token_ids, answer, random.Random(0), tools=TOOLS) == parts
    broken = codec.encode("<tool_call>{</tool_call>", add_special_tokens=False)
    assert form.read(broken, "", tools=TOOLS).found == [BrokenCall("{", "invalid_json")]
    assert form.read(broken, "").text == "{"


def test_names_that_are_no_family_are_refused():
    assert check_format_name("renderers:glm-4.5") == "renderers:glm-4.5"
    for name in ("renderers:qwen9", "renderers:auto", "renderers:custom"):
        with pytest.raises(RequestError, match="a renderer of the package"):
            check_format_name(name)
    with pytest.raises(RequestError, match="a renderer that takes this tokenizer"):
        answer_format(codec_with([]), None, "renderers:gpt-oss")
