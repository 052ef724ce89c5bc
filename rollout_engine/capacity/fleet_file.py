"""Reads a fleet file (TOML), `table.key=value` overrides, and the cases that its table [compare] makes of it."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import ConfigError, refused, unknown_name
from rollout_engine.base.toml_files import TomlFile, set_key, value_of
from rollout_engine.capacity.options import (
    CostsTable,
    EngineTable,
    FailuresTable,
    FleetFile,
    FleetTable,
    Lengths,
    Table,
    TrainingTable,
    WeightsTable,
    WorkloadTable,
)

TABLES: dict[str, type[Table]] = {
    "fleet": FleetTable,
    "engine": EngineTable,
    "costs": CostsTable,
    "workload": WorkloadTable,
    "training": TrainingTable,
    "weights": WeightsTable,
    "failures": FailuresTable,
}
_LENGTHS = ("prompt_tokens", "output_tokens")
_MAX_CASES = 64
_EXAMPLE = "examples/fleet.toml"
_COST_SOURCES = ("costs.file", "costs.measure")
_COST_NAMES = ("step_seconds", "row_seconds", "prefill_token_seconds", "context_token_seconds")


class Case(NamedTuple):
    """One row of a comparison."""

    settings: dict[str, Any]
    """Its values of the compared settings: "table.key" -> value."""
    file: FleetFile


def read_cases(path: Path | None, overrides: Sequence[str]) -> list[Case]:
    """The cases of a file (None: all defaults) with overrides `table.key=value`, of which `compare.table.key=[...]`.

    Raises `ConfigError` for a file that cannot be read, an unknown table or key, naming the closest, and a value out of
    bounds.
    """
    content = {} if path is None else TomlFile.read(path, _EXAMPLE).content
    where = "" if path is None else f"{path}: "
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or ("." not in key and key != "seed"):
            raise ConfigError(f"'{override}' is not an option: write table.key=value, as fleet.num_replicas=1000.")
        if key.startswith("compare."):
            content.setdefault("compare", {})[key.removeprefix("compare.")] = value_of(text)
        else:
            if key in _COST_SOURCES and isinstance(content.get("costs"), dict):  # in place of the file's numbers
                content["costs"] = {name: each for name, each in content["costs"].items() if name not in _COST_NAMES}
            set_key(content, key, value_of(text))
    compared = content.pop("compare", {})
    if not isinstance(compared, dict):
        raise ConfigError(where + refused("compare", compared, 'a table, as [compare] with "fleet.balancer" = [...]'))
    base = _make_fleet_file(content, where)
    if base.costs.file:
        content["costs"] = _measured_before(Path(base.costs.file), path)
    if base.costs.measure and (numbers := [key for key in _flat(compared) if key.startswith("costs.")]):
        raise ConfigError(f"{where}compare.{numbers[0]} is not possible with costs.measure: measure to a file first.")
    cases = [_case(content, settings, where) for settings in _settings(_flat(compared), where)]
    for case in cases:
        case.file.check()
    return cases


def with_costs(case: Case, costs: CostsTable) -> Case:
    """The same case with these costs."""
    return case._replace(file=msgspec.structs.replace(case.file, costs=costs))


def _measured_before(path: Path, beside: Path | None) -> dict[str, Any]:
    """The numbers of another file's table [costs]; its path is relative to the fleet file."""
    path = path if beside is None else beside.parent / path
    table = TomlFile.read(path, _EXAMPLE).content.get("costs")
    if not isinstance(table, dict) or not set(_COST_NAMES) <= set(table):
        raise ConfigError(
            f"{path} has no table [costs] with {', '.join(_COST_NAMES)}: `simulate --measure` writes one."
        )
    return {name: table[name] for name in _COST_NAMES}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table's keys with those of the tables in it, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _settings(compared: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Every combination of the compared settings."""
    for key, values in compared.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(where + refused(f"compare.{key}", values, "a list of the values to compare"))
        if key in _COST_SOURCES:
            raise ConfigError(
                f"{where}compare.{key} is not possible: costs come from one place. Compare their numbers."
            )
    cases = [dict(zip(compared, values, strict=True)) for values in itertools.product(*compared.values())]
    if len(cases) > _MAX_CASES:
        raise ConfigError(f"{where}[compare] makes {len(cases)} cases, more than {_MAX_CASES}: compare fewer values.")
    return cases


def _case(content: Mapping[str, Any], settings: dict[str, Any], where: str) -> Case:
    changed = msgspec.json.decode(msgspec.json.encode(content))  # a copy down to its leaves
    for key, value in settings.items():
        set_key(changed, key, value)
    return Case(settings, _make_fleet_file(changed, where))


def _make_fleet_file(content: Mapping[str, Any], where: str) -> FleetFile:
    for name in content:
        if name not in (*TABLES, "seed"):
            raise ConfigError(where + unknown_name("table", name, (*TABLES, "compare", "seed")))
    tables = {name: _table(name, content.get(name, {}), where) for name in TABLES}
    seed = content.get("seed", 0)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ConfigError(where + refused("seed", seed, "an int of at least 0"))
    return FleetFile(**tables, seed=seed)


def _table(name: str, given: Any, where: str) -> Any:
    kind = TABLES[name]
    if not isinstance(given, dict):
        raise ConfigError(where + refused(name, given, f"a table: write [{name}] above its keys"))
    if name == "workload":
        parts = {
            key: _struct(Lengths, f"workload.{key}", value, where) for key, value in given.items() if key in _LENGTHS
        }
        given = given | parts
    source = given.get("file") or given.get("measure")
    if name == "costs" and source and (numbers := [key for key in given if key in _COST_NAMES]):
        raise ConfigError(f"{where}[costs] has {numbers[0]} and takes its numbers from {source}: give one of them.")
    return _struct(kind, name, given, where)


def _struct(kind: type[Table], name: str, given: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise ConfigError(where + refused(name, given, "a table, as { median = 800, p95 = 4000, most = 8192 }"))
    for key in given:
        if key not in kind.__struct_fields__:
            other = next((table for table, each in TABLES.items() if key in each.__struct_fields__), None)
            hint = f"'{key}' belongs to [{other}], not to [{name}]." if other else ""
            raise ConfigError(where + (hint or unknown_name(f"key of [{name}]", key, kind.__struct_fields__)))
    try:
        return kind(**given)
    except ConfigError as problem:
        raise ConfigError(f"{where}[{name}]: {problem}") from None
