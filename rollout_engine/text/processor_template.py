"""The chat template of a model with images, whose processor has it in place of the tokenizer."""

import json
from pathlib import Path
from typing import Any

import msgspec

from rollout_engine.base.errors import ConfigError

_FILES = ("chat_template.json", "processor_config.json")


def processor_template(directory: Path) -> str | dict[str, str] | None:
    """The chat template in the files of a processor: one, or several by name; None if they have none.

    Raises `ConfigError` for a file that is damaged.
    """
    for path in (directory / name for name in _FILES):
        if not path.is_file():
            continue
        try:
            found: Any = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as problem:
            raise ConfigError(f"{path} is not valid JSON: {problem}.") from None
        template = found.get("chat_template") if isinstance(found, dict) else None
        if isinstance(template, list) and all(isinstance(each, dict) for each in template):
            template = {str(each.get("name")): each.get("template") for each in template}
        if template is None:
            continue
        try:
            return msgspec.convert(template, str | dict[str, str])
        except msgspec.ValidationError as problem:
            raise ConfigError(f"{path}: chat_template={template!r:.60} is not valid: {problem}.") from None
    return None
