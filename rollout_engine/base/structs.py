"""Base of the msgspec structs that users build: names, types and bounds are checked when one is made.

A bare msgspec Struct checks neither names nor types. A struct whose metaclass is `CheckedStruct` does, wherever a
user calls it; decoding from the wire goes through msgspec's own typed path and then through `check()`.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import msgspec

from rollout_engine.base.errors import ConfigError, RequestError, refused, unknown_name
from rollout_engine.base.msgspec_errors import Misfit
from rollout_engine.base.peer_options import peer_option
from sync.described_types import describe_types

_PLACE = re.compile(r"(\w+)((?:\[\d+\])*)")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_WORDS = {"int": "an int", "float": "a number", "str": "a str", "bool": "a bool", "array": "a list", "object": "a dict"}
_WORDS |= {"null": "None", "NoneType": "None"}
"""Names of types in errors, by those of msgspec and Python."""
_MAX_DEPTH = 16
_PLAIN = {int, float, str, bool, type(None)}


class CheckedStruct(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass: calling the class validates names and types (msgspec), then bounds (`check()`).

    Values are converted first: scalars and arrays of numpy and torch to plain numbers and lists, then by the `readings`
    of their field.
    """

    def __init__(cls, *args: Any, **options: Any) -> None:
        super().__init__(*args)
        describe_types(cls)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise cls._error(
                f"{cls.__name__} takes options by name only: write name=value, not {args!r:.60}.", "", args
            )
        for name in kwargs:
            if name not in cls.__struct_fields__:
                raise cls._error(cls._unknown(name), name, kwargs[name])
        given = {name: cls._read(name, plain(value)) for name, value in kwargs.items()}
        try:
            made: Any = msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as problem:
            raise cls._make_refusal(given, Misfit.of(problem)) from None
        except UnicodeEncodeError:
            name = next(name for name, value in given.items() if "\\ud" in ascii(value))
            raise cls._error(refused(name, given[name], "Unicode text"), name, given[name]) from None
        made.check()
        for name in given:
            bound = _sendable_bound(getattr(made, name))
            if bound:
                raise cls._error(refused(name, given[name], bound), name, given[name])
        return made

    def _read(cls, name: str, value: Any) -> Any:
        reading = cls.readings.get(name)
        return reading(value) if reading else value

    def _unknown(cls, name: str) -> str:
        for other in UserStruct.__subclasses__():
            if name in other.__struct_fields__:
                return f"'{name}' is not an option of {cls.__name__}: give it to {other.__name__}."
        peers = peer_option(cls.peers, name)
        return peers or unknown_name(f"{cls.__name__} option", name, cls.__struct_fields__)

    def _make_refusal(cls, given: dict[str, Any], misfit: Misfit) -> Exception:
        """Make the error for a value of the wrong type."""
        place = _PLACE.match(misfit.path)
        if place is None:
            what = f"give {misfit.missing}=..., it has no default" if misfit.missing else misfit.text
            return cls._error(f"{cls.__name__}: {what}.", misfit.missing, given)
        name, value = place[1], given[place[1]]
        for index in re.findall(r"\d+", place[2]):
            value = value[int(index)]
        annotation = get_type_hints(cls)[name]
        choices = _choices(annotation)
        if choices and not place[2]:
            bound = f"one of {', '.join(map(repr, choices))}"
        else:
            words = "" if misfit.expected and not misfit.got else allowed_words(annotation, place[2].count("["))
            bound = words or (_describe_bound(value, misfit) if misfit.expected else misfit.text)
        return cls._error(refused(name + place[2], value, bound), name, value)

    def _error(cls, text: str, name: str, value: object) -> Exception:
        kind: type[ConfigError] | type[RequestError] = cls.error_class
        return kind(text, field=name, value=value) if issubclass(kind, RequestError) else kind(text)


class UserStruct(msgspec.Struct, metaclass=CheckedStruct, frozen=True, kw_only=True):
    """Base of structs that users build; subclasses name their error class and add `check`."""

    error_class: ClassVar[type[ConfigError] | type[RequestError]] = ConfigError
    readings: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """Field -> converts accepted values to the field's type; it returns a value that it cannot read unchanged."""
    peers: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Options of other libraries, see `peer_options`."""

    def check(self) -> None:
        """Raise `error_class` if a bound between or within fields is broken."""

    def clone(self, **changes: Any) -> Self:
        """Copy with these fields changed, checked like a new struct."""
        return type(self)(**(msgspec.structs.asdict(self) | changes))


def arguments_struct(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> type[msgspec.Struct]:
    """Make the struct that a call's arguments are checked against; a parameter's type is its hint."""
    fields = [(p.name, hints[p.name], *([] if p.default is p.empty else [p.default])) for p in parameters]
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def plain(value: Any, depth: int = 0) -> Any:
    """Convert scalars and arrays of numpy and torch to plain numbers and lists, down to a depth of 16."""
    if type(value) in _PLAIN or depth > _MAX_DEPTH:
        return value
    if hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, type):
        return value.tolist()
    if type(value) is dict:
        return {plain(key): plain(item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple) and not set(map(type, value)) <= _PLAIN:
        return type(value)(plain(item, depth + 1) for item in value)
    return list(value) if type(value) in (range, set, frozenset) else value


def _sendable_bound(value: Any) -> str:
    """Describe the bound that a number or text breaks if it cannot be sent to another process, else ""."""
    if type(value) is int:
        return "" if -(2**63) <= value < 2**64 else "a number of 64 bits"
    texts = (value,) if type(value) is str else value if type(value) in (list, tuple) else ()
    if texts and type(texts[0]) is str and any(map(_HALF_PAIR.search, texts)):
        return "Unicode text"
    return ""


def _describe_bound(value: Any, misfit: Misfit) -> str:
    """Describe the allowed types of a field, for an error caused by `value`."""
    kinds = misfit.describe_types(_WORDS)
    if misfit.in_key or "[...]" in misfit.path:
        return f"a dict whose {'keys' if misfit.in_key else 'values'} are each {kinds}"
    got = "None" if value is None else type(value).__name__
    return f"{kinds}, not {got}" if misfit.got else kinds


def allowed_words(annotation: Any, depth: int) -> str:
    """Describe the values of a field of literals and other types, or of its elements `depth` lists down; else ""."""
    for _ in range(depth):
        annotation = next(iter(get_args(annotation)), None)
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    others = [_WORDS.get(kind.__name__, f"a {kind.__name__}") for kind in kinds if isinstance(kind, type)]
    listed = ", ".join(map(repr, literals))
    if not literals:
        return ""
    return " or ".join([listed, *others]) if others else f"one of {listed}"


def _choices(annotation: Any) -> list[Any]:
    """List the allowed values of a field of literals (and bool and None); [] for any other field."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    known = {bool: (True, False), type(None): (None,)}
    values = [get_args(kind) if get_origin(kind) is Literal else known.get(kind) for kind in kinds]
    return [] if None in values else [value for each in values if each for value in each]
