"""`key=value` on the command line, sorted into engine options and sampling params by their names."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError, unknown_name
from rollout_engine.sampling_params import SamplingParams

_ENGINE = {field.name: field.type for field in msgspec.structs.fields(EngineConfig) if field.name != "model"}
# A name that both have is the engine's: its `seed` roots the seeds of all samples.
_SAMPLING = {f.name: f.type for f in msgspec.structs.fields(SamplingParams) if f.name not in (*_ENGINE, "output_kind")}


class Overrides(NamedTuple):
    """Keyword arguments, values converted to the fields' types; bounds are checked by the classes they go to."""

    engine: dict[str, Any]
    sampling: dict[str, Any]


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take `key=value` arguments, as `overrides`."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any field of EngineConfig or SamplingParams, as dtype=float32 max_tokens=64 stop='[\"\\n\"]'; lists are "
        "JSON; seed= is the engine's",
    )


def parse_overrides(arguments: Sequence[str]) -> Overrides:
    """Raises `ConfigError` for a name that neither class has, naming the closest, and for what is no `key=value`."""
    found = Overrides({}, {})
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"'{argument}' is not an option: write key=value, as max_tokens=64.")
        if name in _ENGINE:
            found.engine[name] = _converted(text, _ENGINE[name])
        elif name in _SAMPLING:
            found.sampling[name] = _converted(text, _SAMPLING[name])
        else:
            raise ConfigError(unknown_name("option", name, (*_ENGINE, *_SAMPLING)))
    return found


def _converted(text: str, kind: Any) -> Any:
    """What `text` means for a field of type `kind`; where it means nothing, `text`, for the field's own error."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):  # bytes of the shell that are no text
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return text
