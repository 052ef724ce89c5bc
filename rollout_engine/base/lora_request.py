"""A LoRA adapter as users name it, and what the engine reports about one that it holds."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError, check_text_size, unknown_name
from rollout_engine.base.peer_options import LORA_PEERS, peer_option

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 1_024, 4_096
_MAX_REVISION = 2**62


class _NamedFields(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass: an unknown option raises `RequestError` with the closest name; the new instance is checked."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in cls.__struct_fields__:
                known = unknown_name(f"{cls.__name__} option", name, cls.__struct_fields__)
                raise RequestError(peer_option(LORA_PEERS, name) or known, field=name, value=kwargs[name])
        if not args and "name" not in kwargs:
            raise RequestError(f"{cls.__name__}: give name=..., it has no default.", field="name")
        made: Any = super().__call__(*args, **kwargs)
        made.check()
        return made


class LoRARequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, metaclass=_NamedFields):
    """A LoRA adapter (Hu et al. 2021) in the format of the package peft: its name, and the source of its values.

    >>> LoRARequest("math", path="runs/7/adapter")
    >>> LoRARequest("math", tensors=get_peft_model_state_dict(model), config=model.peft_config["default"], revision=3)

    In requests it may have a name alone, of an adapter that the engine has.
    """

    name: str
    path: str | None = None
    """Directory with adapter_config.json and adapter_model.safetensors, where the model runs."""
    tensors: dict[str, Any] | None = None
    """Tensors by the names that peft gives them; then `config` is needed too."""
    revision: int = 0
    """Grows whenever an adapter of the same name gets other values. Left out if no values are given."""
    config: Any = None
    """The contents of adapter_config.json, as a dict or a `LoraConfig` of peft, for `tensors`."""

    @property
    def has_values(self) -> bool:
        """Whether it names a source of its values."""
        return self.path is not None or self.tensors is not None

    def sendable(self) -> "LoRARequest":
        """The same with plain values: an absolute path, a config that is a dict."""
        path = None if self.path is None else os.path.abspath(os.path.expanduser(self.path))
        config = self.config
        if config is not None and not isinstance(config, Mapping):
            config = config.to_dict()
        config = None if config is None else {str(key): _plain(value) for key, value in config.items()}
        return LoRARequest(self.name, path, self.tensors, self.revision, config)

    def check(self) -> None:
        """Raise `RequestError` for values of another kind than the fields'."""
        if not isinstance(self.name, str) or not self.name:
            raise RequestError.for_field("name", self.name, "the adapter's name, a str that is not empty")
        check_text_size("name", self.name, _MAX_NAME_BYTES)
        if isinstance(self.path, os.PathLike):
            msgspec.structs.force_setattr(self, "path", os.fspath(self.path))
        if self.path is not None:
            if not isinstance(self.path, str) or not self.path:
                given: Any = self.path  # in vLLM the second argument is a number
                hint = "Adapters have names here and no numbers: LoRARequest(name, path=...)." * (type(given) is int)
                raise RequestError.for_field("path", given, "the directory of an adapter, or None", hint)
            check_text_size("path", self.path, _MAX_PATH_BYTES)
        if self.tensors is not None and not isinstance(self.tensors, dict):
            raise RequestError.for_field("tensors", type(self.tensors).__name__, "a dict of names and tensors, or None")
        if self.path is not None and self.tensors is not None:
            raise RequestError("path and tensors are both given: give one of them.", field="tensors")
        if type(self.revision) is not int or not 0 <= self.revision < _MAX_REVISION:
            raise RequestError.for_field("revision", self.revision, f"an int in [0, {_MAX_REVISION})")
        if self.revision and not self.has_values:
            hint = "Requests run under the revision that the engine has: leave it out, or give the values with it."
            raise RequestError.for_field("revision", self.revision, "given with path or tensors", hint)
        is_config = self.config is None or isinstance(self.config, Mapping) or hasattr(self.config, "to_dict")
        if not is_config:
            raise RequestError.for_field("config", self.config, "a dict, a LoraConfig of peft, or None")


class LoRAInfo(msgspec.Struct, frozen=True):
    """An adapter that an engine holds."""

    name: str
    revision: int
    rank: int
    """The largest of its layers."""
    num_bytes: int
    """Memory that its matrices take."""
    digest: str
    """Digest of its values, as the engine holds them."""
    policy_version: int
    """Version of the engine when it got these values."""
    is_pinned: bool = False
    """Whether it stays until it is removed."""


LoRALike = LoRARequest | str
"""An adapter, or the name of one that the engine has."""


def as_lora_request(value: Any, field: str = "lora_request") -> LoRARequest:
    """Convert a name to a `LoRARequest`. Raises `RequestError` for anything else."""
    if isinstance(value, str) and value:
        return LoRARequest(value)
    if not isinstance(value, LoRARequest):
        raise RequestError.for_field(field, value, "a LoRARequest, or the name of an adapter that the engine has")
    return value


def _plain(value: Any) -> Any:
    """Values of a config that can be sent: sets are lists, enumerations their values, other objects text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    value = getattr(value, "value", value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
