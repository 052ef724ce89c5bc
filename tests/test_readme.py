"""Every Python block of the README runs as printed, top to bottom, in one namespace."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_code_comes_early():
    text = README.read_text()
    assert text[: BLOCK.search(text).start()].count("\n") < 30


def test_every_code_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    text = README.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match.group(1), str(README), "exec"), namespace)
