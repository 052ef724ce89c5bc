"""Reads a sweep file (TOML): a model, and the arguments of `RolloutPolicy.evaluate`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError, refused, unknown_name
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.toml_files import Key, TomlFile, set_key, value_of
from rollout_engine.rollouts.evaluation.sweep import SET_BY_EVALUATE, as_sweep
from rollout_engine.rollouts.evaluation.tasks import EvalTask, prepare_tasks

_EXAMPLE = "examples/sweep.toml"
_TOP = ("model", "out", "num_samples", "k", "seed", "checkpoints", "engine", "settings", "grid", "tasks")
_SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if name not in SET_BY_EVALUATE)
_ENGINE = (*(name for name in EngineConfig.__struct_fields__ if name != "model"), "num_replicas", "placement")
_ARGUMENTS = ("num_samples", "k", "seed", "out", "tasks")


class SweepFile(NamedTuple):
    """The content of a sweep file."""

    model: str
    engine: dict[str, Any]
    """Options of `RolloutPolicy.from_pretrained`."""
    arguments: dict[str, Any]
    """Arguments of `RolloutPolicy.evaluate`."""
    source: TomlFile
    overridden: tuple[str, ...] = ()
    """Names of the keys that the file did not set."""

    def check(self) -> None:
        """Check settings, and prepare the tasks of `arguments`, before a model is loaded.

        Raises `ConfigError` with the line of the key at fault.
        """
        for name, setting in (self.arguments["sweep"]["settings"] or {}).items():
            with self._at(("settings", name), f"[settings.{name}]", setting):
                SamplingParams(**setting)
        with self.locate_errors():
            as_sweep(self.arguments["sweep"]).named_settings()
        for index, task in enumerate(self.arguments["tasks"]):
            with self._at(("tasks", index), f"[[tasks]] {index + 1}", task):
                self.arguments["tasks"][index : index + 1] = prepare_tasks([task])

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Re-raise the errors of a block as `ConfigError`, with the line of the key that they name."""
        try:
            yield
        except (ConfigError, RequestError) as problem:
            if any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", str(problem)) for name in self.overridden):
                raise
            raise self.source.add_location(ConfigError(str(problem)), {}) from problem

    @contextmanager
    def _at(self, table: Key, label: str, content: Mapping[str, Any]) -> Iterator[None]:
        """Re-raise the errors of a table's keys, with the line of the key at fault, or else of the first."""
        try:
            yield
        except (ConfigError, RequestError) as problem:
            text = str(problem)
            named = re.match(r"\w+", getattr(problem, "field", "") or text)
            key = named[0] if named and named[0] in content else None
            if key is None:  # a file that is wrong inside is named itself
                paths = {name: value for name, value in content.items() if isinstance(value, str) and value}
                key = next((name for name, value in paths.items() if text.startswith(value)), None)
            place = self.source.place((*table, key or next(iter(content))))
            raise ConfigError(f"{place}: {label}: {text}{self._hint(key, content)}") from problem

    def _hint(self, key: str | None, task: Mapping[str, Any]) -> str:
        """Name the place in which a file or a function is looked up, if that may be the mistake."""
        beside = Path(self.source.path).parent
        if key in ("reward_fn", "answer"):
            return f" Modules are looked for beside the sweep file, in {beside.resolve()}, before all others."
        if key != "rows" or not isinstance(task["rows"], str) or Path(task["rows"]).exists():
            return ""
        found = beside / task["rows"]
        there = f" Beside the sweep file there is one: give '{found}'." if found.exists() else ""
        return f" Paths count from the working directory, {Path.cwd()}.{there}"


def read_sweep_file(path: Path, overrides: Sequence[str] = ()) -> SweepFile:
    """The content of a file, with overrides such as `num_samples=4` and `engine.dtype=float32`.

    Raises `ConfigError` for a file that cannot be read, and for an unknown key, with its line and the closest name.
    Values are checked by `SweepFile.check`, or when they are used.
    """
    file = TomlFile.read(path, _EXAMPLE)
    content, overridden = file.content, []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"'{override}' is not an option: write key=value, as num_samples=4.")
        set_key(content, key, value_of(text))
        overridden.append(key.rpartition(".")[2])
    check = _Keys(file, overrides)
    check.refuse_unknown((), content, _TOP)
    for table in ("engine", "settings", "grid"):
        check.is_table(table, content.get(table, {}))
    check.refuse_unknown(("engine",), content.get("engine", {}), _ENGINE)
    check.refuse_unknown(("grid",), content.get("grid", {}), _SAMPLING)
    for name, setting in content.get("settings", {}).items():
        check.is_table(f"settings.{name}", setting)
        check.refuse_unknown(("settings", name), setting, _SAMPLING)
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise ConfigError(
            f"{path}: " + refused("tasks", tasks, "a list of tables: write [[tasks]] above the keys of each")
        )
    for index, task in enumerate(tasks):
        check.is_table(f"tasks[{index}]", task)
        check.refuse_unknown(("tasks", index), task, EvalTask.__struct_fields__)
    for name in ("model", "out"):
        if not isinstance(content.get(name), str) or not content[name]:
            place = check.place((name,)) if name in content else path
            raise ConfigError(f"{place}: " + refused(name, content.get(name), "a text: a sweep file needs it"))
    sweep = {"settings": content.get("settings") or None, "grid": content.get("grid", {})}
    sweep["checkpoints"] = content.get("checkpoints")
    arguments = {name: content[name] for name in _ARGUMENTS if name in content} | {"sweep": sweep}
    return SweepFile(content["model"], content.get("engine", {}), arguments, file, tuple(overridden))


class _Keys:
    """Checks keys of a file's tables."""

    def __init__(self, file: TomlFile, overrides: Sequence[str]) -> None:
        self._file = file
        self._given = {override.partition("=")[0]: override for override in overrides}

    def is_table(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{self._file.path}: " + refused(name, value, f"a table: write [{name}] above its keys"))

    def refuse_unknown(self, table: Key, content: dict[str, Any], names: Iterable[str]) -> None:
        for key in content:
            if key not in (known := tuple(names)):
                named = ".".join(name for name in table if isinstance(name, str))
                kind = f"key of [{named}]" if table else "key"
                raise ConfigError(f"{self.place((*table, key))}: {unknown_name(kind, key, known)}")

    def place(self, key: Key) -> str:
        """The place that sets a key: the file and its line, or the override."""
        given = self._given.get(".".join(map(str, key)))
        return self._file.place(key) if given is None else f"'{given}'"
