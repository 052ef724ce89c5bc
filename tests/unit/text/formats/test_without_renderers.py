"""Names of the package `renderers` without the package."""

import sys

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.text.formats.choose import check_format_name


def test_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(RequestError, match=r"rollout-engine\[renderers\]"):
        check_format_name("renderers:qwen3")
