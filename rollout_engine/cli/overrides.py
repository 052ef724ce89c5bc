"""Parses `key=value` arguments into engine options and sampling params, by their names."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args, get_origin

import msgspec

from rollout_engine.base.config import EXAMPLE_FILE, EngineConfig
from rollout_engine.base.errors import ConfigError, unknown_name
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.toml_files import TomlFile

_ENGINE = {field.name: field.type for field in msgspec.structs.fields(EngineConfig) if field.name != "model"}
# A name that both have goes to the engine: its `seed` determines the seeds of all samples.
_SAMPLING = {f.name: f.type for f in msgspec.structs.fields(SamplingParams) if f.name not in (*_ENGINE, "output_kind")}


class Overrides(NamedTuple):
    """Keyword arguments with values of the fields' types; EngineConfig and SamplingParams check their bounds."""

    engine: dict[str, Any]
    sampling: dict[str, Any]


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key=value` arguments to `parser`, as `overrides`."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="any field of EngineConfig or SamplingParams, as dtype=float32 max_tokens=64 stop=END; values of "
        'a list are JSON, as stop=\'["a", "\\n"]\'; seed= is the engine\'s; '
        "config=FILE reads options of EngineConfig from a TOML file, such as `tune` writes",
    )


def parse_overrides(arguments: Sequence[str]) -> Overrides:
    """Sort arguments into engine options and sampling params. `config=FILE` gives engine options that others replace.

    Raises `ConfigError` for an unknown name, naming the closest; for an argument that is not `key=value`; for a list
    that is not JSON.
    """
    found, from_file = Overrides({}, {}), dict[str, Any]()
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"'{argument}' is not an option: write key=value, as max_tokens=64.")
        if name == "config":
            from_file |= _from_file(text)
        elif name in _ENGINE:
            found.engine[name] = _convert(name, text, _ENGINE[name])
        elif name in _SAMPLING:
            found.sampling[name] = _convert(name, text, _SAMPLING[name])
        else:
            raise ConfigError(unknown_name("option", name, (*_ENGINE, *_SAMPLING, "config")))
    return found._replace(engine=from_file | found.engine)


def _from_file(path: str) -> dict[str, Any]:
    """The options of a file, checked. Its model is left out: commands name their own."""
    EngineConfig.load(path, model="a model")
    return {name: value for name, value in TomlFile.read(path, EXAMPLE_FILE).content.items() if name != "model"}


def _convert(name: str, text: str, kind: Any) -> Any:
    """`text` as a value of type `kind`; if it does not fit, its JSON value, for the field's own check to refuse."""
    value = _from_json(text)
    if _takes(kind, (list, tuple, dict)) and text.lstrip().startswith(("[", "{")):
        if value is text:
            example = '{"5": 1.0}' if _takes(kind, (dict,)) else '["a", "b"]'
            raise ConfigError(f"{name}={text:.80} is not JSON: write it as {name}='{example}'.")
        meanings = [value]
    else:
        meanings = [text, value, [text]]  # the last: a list of one value
    return next((found for meaning in meanings for found in _as_kind(meaning, kind)), value)


def _as_kind(value: Any, kind: Any) -> list[Any]:
    """`value` converted to `kind`, in a list; empty if it does not fit."""
    try:
        return [msgspec.convert(value, kind, strict=False)]
    except (msgspec.ValidationError, UnicodeEncodeError):  # bytes from the shell that are not text
        return []


def _from_json(text: str) -> Any:
    """Parse `text` as JSON; return `text` itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def _takes(kind: Any, origins: tuple[type, ...]) -> bool:
    """Whether `kind` is one of these generic types or a union that includes one."""
    return any((get_origin(each) or each) in origins for each in (kind, *get_args(kind)))
