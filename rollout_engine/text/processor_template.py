"""The chat template of a model with images, whose processor has it in place of the tokenizer."""

import json
from pathlib import Path
from typing import Any

_FILES = ("chat_template.json", "processor_config.json")


def processor_template(directory: Path) -> str | dict[str, str] | None:
    """The chat template in the files of a processor: one, or several by name; None if they have none."""
    for name in _FILES:
        try:
            found: Any = json.loads((directory / name).read_text())
        except (OSError, ValueError, RecursionError):  # absent, or no JSON: transformers would not read it either
            continue
        template = found.get("chat_template") if isinstance(found, dict) else None
        if isinstance(template, list):
            template = {each["name"]: each["template"] for each in template if isinstance(each, dict)}
        if isinstance(template, str | dict) and template:
            return template
    return None
