"""One door for the msgspec structs that users build: names, types and bounds are checked, once.

A bare msgspec Struct checks neither names nor types. A struct whose metaclass is `CheckedStruct` does, wherever a
user calls it; decoding from the wire goes through msgspec's own typed path and then through `check()`.
"""

import re
from typing import Any, ClassVar

import msgspec

from rollout_engine.errors import ConfigError, RequestError, unknown_name

_FIELD_IN_MESSAGE = re.compile(r"`\$\.?([A-Za-z_0-9]*)")


class CheckedStruct(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass: calling the class validates names and types (msgspec), then bounds (`check()`)."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise cls._error(f"{cls.__name__} takes keyword arguments only, not {args!r:.60}", "", args)
        known = cls.__struct_fields__
        for name in kwargs:
            if name not in known:
                raise cls._error(unknown_name(f"{cls.__name__} option", name, known), name, kwargs[name])
        try:
            made = msgspec.convert(kwargs, cls, strict=True)
        except msgspec.ValidationError as problem:
            match = _FIELD_IN_MESSAGE.search(str(problem))
            name = match.group(1) if match else ""
            value = kwargs.get(name)
            raise cls._error(f"{name}={value!r:.80} is not allowed: {problem}.", name, value) from None
        made.check()
        return made

    def _error(cls, text: str, name: str, value: object) -> Exception:
        if issubclass(cls.error_class, RequestError):
            return cls.error_class(text, field=name, value=value)
        return cls.error_class(text)


class UserStruct(msgspec.Struct, metaclass=CheckedStruct, frozen=True, kw_only=True):
    """Base of structs that users build; subclasses name their error class and add `check`."""

    error_class: ClassVar[type[ConfigError] | type[RequestError]] = ConfigError

    def check(self) -> None:
        """Raise `error_class` if a bound between or within fields is broken."""

    def check_again(self) -> None:
        """Raise as a call with these fields would: nobody has checked what `msgspec.structs.replace` made."""
        type(self)(**msgspec.structs.asdict(self))
