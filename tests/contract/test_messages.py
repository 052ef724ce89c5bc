"""A message's fields change only with a new `PROTOCOL`."""

import msgspec
import numpy as np

from rollout_engine.base.messages import EngineCoreRequest
from tests.contract.messages import ADVICE, STALE, Messages, differences, problem_of, read, structs_in, today, write


def test_no_field_of_a_message_has_changed_without_a_new_protocol():
    problem = problem_of(read(), today())
    assert not problem, problem


def test_the_messages_are_those_that_travel_with_all_that_is_in_them():
    names = {name.partition(" ")[0] for name in today().fields}
    assert {"Hello", "AddRequest", "EngineCoreRequest", "SamplingParams", "EngineConfig", "CoreStats", "verb"} <= names
    assert "policy_version: int" in today().fields["EngineCoreOutputs"]


class Inner(msgspec.Struct):
    rows: np.ndarray | None = None


class Outer(msgspec.Struct, tag="out"):
    inner: list[Inner]
    mode: str = "a"


def test_a_field_that_is_new_gone_moved_or_of_another_type_is_a_change():
    kept = Messages(3, dict(structs_in(Outer)))
    assert kept.fields == {"Outer (out)": ["inner: list[Inner]", "mode: str"], "Inner": ["rows: ndarray | None"]}
    for fields, change in (
        (["inner: list[Inner]", "mode: str", "more: int"], "+ more: int"),
        (["inner: list[Inner]"], "- mode: str"),
        (["mode: str", "inner: list[Inner]"], "in another order"),
        (["inner: list[Inner]", "mode: int"], "- mode: str"),
    ):
        found = Messages(3, kept.fields | {"Outer (out)": fields})
        assert differences(kept, found)[0] == f"Outer (out): {change}"
        assert problem_of(kept, found).endswith(ADVICE) and "--write" in ADVICE
        assert problem_of(kept, found._replace(protocol=4)) == STALE
    assert problem_of(kept, kept) == ""


def test_writing_raises_the_number_once_and_only_for_a_change(tmp_path):
    kept, number = tmp_path / "kept.json", tmp_path / "wire.py"
    number.write_text('PROTOCOL = 3\n"""Version."""\n')
    kept.write_text('{"protocol": 3, "fields": {"A": ["a: int"]}}')
    assert write(Messages(3, {"A": ["a: int"]}), kept, number) == 3
    assert write(Messages(3, {"A": ["a: str"]}), kept, number) == 4
    assert number.read_text() == 'PROTOCOL = 4\n"""Version."""\n' and read(kept) == Messages(4, {"A": ["a: str"]})
    assert write(Messages(4, {"A": ["a: str"]}), kept, number) == 4
    assert write(Messages(5, {"A": ["a: bool"]}), kept, number) == 5  # it has been raised by hand


def test_fields_of_a_request_are_held():
    names = [line.partition(":")[0] for line in today().fields["EngineCoreRequest"]]
    assert names == list(EngineCoreRequest.__struct_fields__)
