"""One door for the msgspec structs that users build: names, types and bounds are checked, once.

A bare msgspec Struct checks neither names nor types. A struct whose metaclass is `CheckedStruct` does, wherever a
user calls it; decoding from the wire goes through msgspec's own typed path and then through `check()`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import msgspec

from rollout_engine.errors import ConfigError, RequestError, refused, unknown_name
from rollout_engine.peer_options import peer_option

_PROBLEM = re.compile(r"Expected `(?P<kind>[^`]*)`(?P<bound>[^,]*?)(?:, got `(?P<got>[^`]*)`)? - at ")
_PLACE = re.compile(r"`\$\.([A-Za-z_0-9]+)((?:\[\d+\])*)")
_MISSING = re.compile(r"missing required field `(\w+)`")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_KINDS = {"int": "an int", "float": "a number", "str": "a str", "bool": "a bool", "array": "a list", "object": "a dict"}
_MAX_DEPTH = 16
_PLAIN = {int, float, str, bool, type(None)}


class CheckedStruct(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass: calling the class validates names and types (msgspec), then bounds (`check()`).

    What means the same is converted first: numpy's and torch's scalars and arrays become plain numbers and lists, and
    each field's own `readings` follow.
    """

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
            made = msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as problem:
            raise cls._refused(given, str(problem)) from None
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

    def _refused(cls, given: dict[str, Any], problem: str) -> Exception:
        """The error for a value of the wrong type, from msgspec's own words for it."""
        place, found = _PLACE.search(problem), _PROBLEM.match(problem)
        if place is None:
            missing = _MISSING.search(problem)
            what = f"give {missing[1]}=..., it has no default" if missing else problem
            return cls._error(f"{cls.__name__}: {what}.", missing[1] if missing else "", given)
        name, value = place[1], given[place[1]]
        for index in re.findall(r"\d+", place[2]):
            value = value[int(index)]
        choices = _choices(get_type_hints(cls)[name])
        if choices and not place[2]:
            bound = f"one of {', '.join(map(repr, choices))}"
        else:
            bound = _bound(value, found, problem) if found else problem
        return cls._error(refused(name + place[2], value, bound), name, value)

    def _error(cls, text: str, name: str, value: object) -> Exception:
        if issubclass(cls.error_class, RequestError):
            return cls.error_class(text, field=name, value=value)
        return cls.error_class(text)


class UserStruct(msgspec.Struct, metaclass=CheckedStruct, frozen=True, kw_only=True):
    """Base of structs that users build; subclasses name their error class and add `check`."""

    error_class: ClassVar[type[ConfigError] | type[RequestError]] = ConfigError
    readings: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """Field -> what turns what people type into what the field holds. It returns what it cannot read as it came."""
    peers: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Options that other libraries have, see `peer_options`."""

    def check(self) -> None:
        """Raise `error_class` if a bound between or within fields is broken."""

    def clone(self, **changes: Any) -> Self:
        """A copy with these fields changed, checked as a new one is."""
        return type(self)(**(msgspec.structs.asdict(self) | changes))


def plain(value: Any, depth: int = 0) -> Any:
    """The same with numpy's and torch's scalars and arrays as plain numbers and lists, down to a depth of 16."""
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
    """The bound that keeps a number or text from crossing to another process; "" where it may cross."""
    if type(value) is int:
        return "" if -(2**63) <= value < 2**64 else "a number of 64 bits"
    texts = (value,) if type(value) is str else value if type(value) in (list, tuple) else ()
    if texts and type(texts[0]) is str and any(map(_HALF_PAIR.search, texts)):
        return "Unicode text"
    return ""


def _bound(value: Any, found: re.Match[str], problem: str) -> str:
    """Describe the allowed values of a field, for an error that `value` has caused."""
    kinds = " or ".join(_KINDS.get(kind, "None") for kind in found["kind"].split(" | ")) + found["bound"]
    if "`key`" in problem:
        return f"a dict whose keys are each {kinds}"
    if "[...]" in problem:
        return f"a dict whose values are each {kinds}"
    got = "None" if value is None else type(value).__name__
    return f"{kinds}, not {got}" if found["got"] else kinds


def _choices(annotation: Any) -> list[Any]:
    """The values of a field that takes only some: its literals, and what stands beside them. Else []."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    known = {bool: (True, False), type(None): (None,)}
    values = [get_args(kind) if get_origin(kind) is Literal else known.get(kind) for kind in kinds]
    return [] if None in values else [value for each in values if each for value in each]
