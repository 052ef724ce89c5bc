"""How tasks are sampled, and by which weights: sampling settings x checkpoints."""

import itertools
import os
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import RequestError, unknown_name
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.base.sampling_params import SamplingParams, as_sampling_params
from rollout_engine.base.seeds import mix
from rollout_engine.base.structs import UserStruct

SET_BY_EVALUATE = ("n", "seed", "prompt_logprobs", "output_kind")


class Setting(NamedTuple):
    """Sampling settings under a name."""

    name: str
    params: SamplingParams

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not the default."""
        return _list_changes(self.params)


class Checkpoint(NamedTuple):
    """Weights under a name."""

    name: str
    source: Any
    """A source that `update_weights` takes, a `LoRARequest`, or the directory of an adapter; None: the live weights."""

    @property
    def path(self) -> str | None:
        """Path of the weights, if they are on disk."""
        source = self.source.path if isinstance(self.source, LoRARequest) else self.source
        return os.fspath(source) if isinstance(source, str | os.PathLike) else None

    def stamp(self) -> str | None:
        """A digest of the names, sizes and times of its files, which changes when one is written; None: no files."""
        if self.path is None or not os.path.exists(self.path):
            return None
        found = [self.path]
        if os.path.isdir(self.path):
            found = sorted(os.path.join(at, name) for at, _, names in os.walk(self.path) for name in names)
        facts = [(os.path.relpath(name, self.path), *_size_and_time(name)) for name in found]
        return sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def lora(self) -> LoRARequest | None:
        """The adapter that samples over the live weights; None for whole weights."""
        if isinstance(self.source, LoRARequest):
            return self.source
        is_adapter = self.path is not None and os.path.isfile(os.path.join(self.path, "adapter_config.json"))
        return LoRARequest(self.name, path=self.path) if is_adapter else None


class Sweep(UserStruct, frozen=True, kw_only=True):  # type: ignore[metaclass]
    """Sampling settings x checkpoints of an evaluation."""

    error_class = RequestError

    settings: Any = None
    """`SamplingParams`, or a list of them (dicts of their fields will do); or a dict from names to these. None: the
    defaults."""
    grid: dict[str, list[Any]] = {}
    """Field of `SamplingParams` -> values: each setting with each combination of them."""
    checkpoints: Any = None
    """Sources that `update_weights` takes, and LoRA adapters: a list of paths, or a dict from names to sources.
    None: the live weights, named by their version."""

    def named_settings(self) -> list[Setting]:
        """All settings. Raises `RequestError` for one that does not fit, and for names that are not distinct."""
        given = self.settings
        if isinstance(given, Mapping):
            named = [(str(name), _params(value)) for name, value in given.items()]
        else:
            named = [("", _params(value)) for value in (given if isinstance(given, list | tuple) else [given])]
        for field, values in self.grid.items():
            if field not in SamplingParams.__struct_fields__:
                raise RequestError(
                    unknown_name("field of SamplingParams in grid", field, SamplingParams.__struct_fields__)
                )
            if not values:
                raise RequestError.for_field(f"grid[{field!r}]", values, "at least one value")
        combinations = [dict(zip(self.grid, each, strict=True)) for each in itertools.product(*self.grid.values())]
        found = [
            Setting(_name(name, params, changes), params.clone(**changes))
            for name, params in named
            for changes in combinations
        ]
        _check_distinct("settings", [setting.name for setting in found])
        for setting in found:
            _check_setting(setting)
        return found

    def named_checkpoints(self, version: int) -> list[Checkpoint]:
        """All checkpoints; the live weights have `version`. Raises `RequestError`."""
        given = self.checkpoints
        if given is None:
            return [Checkpoint(f"version {version}", None)]
        if isinstance(given, Mapping) and not any(hasattr(value, "shape") for value in given.values()):
            found = [Checkpoint(str(name), source) for name, source in given.items()]
        else:
            listed = given if isinstance(given, list | tuple) else [given]
            for index, source in enumerate(listed):
                if not isinstance(source, str | os.PathLike | LoRARequest):
                    hint = "Give a dict from names to sources."
                    raise RequestError.for_field(f"checkpoints[{index}]", source, "a path, or a LoRARequest", hint)
            found = [
                Checkpoint(each.name if isinstance(each, LoRARequest) else os.fspath(each), each) for each in listed
            ]
        if not found:
            raise RequestError.for_field("checkpoints", given, "at least one, or None for the live weights")
        _check_distinct("checkpoints", [checkpoint.name for checkpoint in found])
        return found


def as_sweep(given: Any) -> Sweep:
    """Convert to a `Sweep`: itself, a dict of its fields, or None. Raises `RequestError`."""
    if isinstance(given, Sweep):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise RequestError.for_field("sweep", given, "a Sweep, a dict of its fields, or None")
    return Sweep(**{str(name): value for name, value in (given or {}).items()})


def seed_of(seed: int, task: str, setting: str) -> int:
    """Root of the seeds of a task's samples under a setting, the same for every checkpoint.

    Sample i of prompt p has the sequence seed child_seed(mix(root, p), i), as in `rollout(seed=root)`.
    """
    for name in (task, setting):
        seed = mix(seed, int.from_bytes(sha256(name.encode()).digest()[:8], "big"))
    return seed


def _size_and_time(path: str) -> tuple[int, int]:
    found = os.stat(path) if os.path.exists(path) else os.lstat(path)  # a link to nothing
    return found.st_size, found.st_mtime_ns


def _params(value: Any) -> SamplingParams:
    return as_sampling_params(dict(value) if isinstance(value, Mapping) else value)


def _list_changes(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    return {
        name: msgspec.to_builtins(getattr(params, name), str_keys=True)
        for name in params.__struct_fields__
        if getattr(params, name) != getattr(default, name)
    }


def _name(given: str, params: SamplingParams, changes: dict[str, Any]) -> str:
    told = changes if given else {**_list_changes(params), **changes}
    return " ".join([*([given] if given else []), *(f"{field}={value}" for field, value in told.items())]) or "default"


def _check_setting(setting: Setting) -> None:
    for name in SET_BY_EVALUATE:
        value, default = getattr(setting.params, name), getattr(SamplingParams(), name)
        if value != default and not (name == "output_kind" and value == "final_only"):
            hint = {"n": "num_samples= says how many.", "seed": "evaluate(seed=...) makes all seeds."}.get(name, "")
            raise RequestError.for_field(f"settings[{setting.name!r}].{name}", value, "left out", hint)


def _check_distinct(field: str, names: list[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError.for_field(field, twice, "different names", "Two have this one.")
