"""The fields of every message between a client and a core, held against `PROTOCOL`, the number of their version.

    python -m tests.contract.messages           prints the fields that differ from messages.json
    python -m tests.contract.messages --write   raises PROTOCOL by one if fields differ, and writes messages.json

Both ends must have the same number, so each change of a field needs a new one: an engine that meets a client of another
version then says so, instead of dropping its frames. Bounds and defaults are not fields.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from rollout_engine.engine.verbs import VERBS
from rollout_engine.fleet.ray.actor import Beat, CorePlace, Order
from rollout_engine.fleet.ray.store_actor import StorePlace
from rollout_engine.process import wire
from rollout_engine.process.weight_server import WEIGHT_VERBS

HERE = Path(__file__).parent
KEPT = HERE / "messages.json"
NUMBER_FILE = Path(wire.__file__)
ADVICE = """
The fields of messages have changed, and PROTOCOL has not: an end of the other version would drop these frames.
Run `python -m tests.contract.messages --write`, which raises PROTOCOL in rollout_engine/process/wire.py by one and
writes the fields to tests/contract/messages.json, and commit both."""
STALE = """
PROTOCOL is new: run `python -m tests.contract.messages --write`, and commit tests/contract/messages.json."""


class Messages(NamedTuple):
    """The messages of one version: by the name of its struct, or of its verb, the fields of each."""

    protocol: int
    fields: dict[str, list[str]]


def today() -> Messages:
    """The messages of the code as it is."""
    fields = dict(structs_in(wire.ToCore, wire.ToClient, wire.Ready, wire.Failure, Order, CorePlace, Beat, StorePlace))
    for name, verb in (VERBS | WEIGHT_VERBS).items():
        if verb.crosses:
            fields |= dict(structs_in(verb.result, *(each.type for each in msgspec.structs.fields(verb.arguments))))
            fields[f"verb {name}"] = [*_fields_of(verb.arguments), f"-> {word_of(verb.result)}"]
    return Messages(wire.PROTOCOL, dict(sorted(fields.items())))


def structs_in(*hints: Any, seen: set[type] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, fields) of each struct that types are made of, the structs in their fields included."""
    seen = set() if seen is None else seen
    for hint in hints:
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in seen:
            seen.add(hint)
            yield _title(hint), _fields_of(hint)
            yield from structs_in(*(each.type for each in msgspec.structs.fields(hint)), seen=seen)
        elif get_origin(hint) is not Literal:
            yield from structs_in(*get_args(hint), seen=seen)


def word_of(hint: Any) -> str:
    """A type in words, without the modules of its classes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return word_of(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (Union, UnionType):
        return " | ".join(map(word_of, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(word_of, arguments))}]"
    return {NoneType: "None", Ellipsis: "..."}.get(hint) or getattr(hint, "__name__", str(hint))


def read(path: Path = KEPT) -> Messages:
    """The messages that a file holds."""
    return Messages(**json.loads(path.read_text(encoding="utf-8")))


def differences(kept: Messages, found: Messages) -> list[str]:
    """A line for each field that only one of the two has, or has in another place."""
    lines = []
    for name in sorted(kept.fields.keys() | found.fields.keys()):
        before, after = kept.fields.get(name, []), found.fields.get(name, [])
        if before != after:
            gone, new = [each for each in before if each not in after], [each for each in after if each not in before]
            changes = [f"- {each}" for each in gone] + [f"+ {each}" for each in new] or ["in another order"]
            lines += [f"{name}: {change}" for change in changes]
    return lines


def problem_of(kept: Messages, found: Messages) -> str:
    """The rule that today's messages break, with the fields and the command that mends it; "" if none."""
    if kept.protocol != found.protocol:
        return STALE
    changes = differences(kept, found)
    return "\n".join([*changes, ADVICE]) if changes else ""


def write(found: Messages, kept_path: Path = KEPT, number_path: Path = NUMBER_FILE) -> int:
    """Keep the messages, under a new number if the fields have changed and the number has not. Returns the number."""
    kept = read(kept_path)
    protocol = found.protocol
    if differences(kept, found) and protocol == kept.protocol:
        protocol += 1
        text = number_path.read_text(encoding="utf-8")
        raised = re.sub(r"^PROTOCOL = \d+$", f"PROTOCOL = {protocol}", text, flags=re.MULTILINE)
        number_path.write_text(raised, encoding="utf-8")
    kept_path.write_text(json.dumps(found._replace(protocol=protocol)._asdict(), indent=1) + "\n", encoding="utf-8")
    return protocol


def _title(struct: type[msgspec.Struct]) -> str:
    tag = struct.__struct_config__.tag
    return f"{struct.__name__} ({tag})" if tag else struct.__name__


def _fields_of(struct: type[msgspec.Struct]) -> list[str]:
    return [f"{each.name}: {word_of(each.type)}" for each in msgspec.structs.fields(struct)]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        print(f"PROTOCOL = {write(today())}")
    else:
        print(problem_of(read(), today()) or f"PROTOCOL = {wire.PROTOCOL}: no field has changed")
