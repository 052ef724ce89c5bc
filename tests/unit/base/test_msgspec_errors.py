"""What msgspec says of a value that does not fit is read from its prose; each form is one that the library meets."""

from typing import Annotated, Literal

import msgspec
import pytest

from rollout_engine.base.msgspec_errors import Misfit


class _Inner(msgspec.Struct, forbid_unknown_fields=True):
    x: int


class _Outer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    n: int | None = None
    sizes: list[Annotated[int, msgspec.Meta(ge=1)]] = []
    name: Annotated[str, msgspec.Meta(max_length=2)] = ""
    biases: dict[int, float] = {}
    mode: Literal["a", "b"] = "a"
    inner: _Inner | None = None


def read(value, kind=_Outer):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, kind)
    return Misfit.of(caught.value)


def test_a_wrong_type():
    misfit = read({"n": "x"})
    assert (misfit.path, misfit.expected, misfit.got, misfit.bound) == ("n", ["int", "null"], "str", "")
    assert misfit.describe_types({"int": "an int", "null": "None"}) == "an int or None"


@pytest.mark.parametrize(
    "value,path,expected",
    [({"sizes": [1, 2, 0]}, "sizes[2]", "int >= 1"), ({"name": "abc"}, "name", "str of length <= 2")],
)
def test_a_broken_bound(value, path, expected):
    misfit = read(value)
    assert (misfit.path, misfit.describe_types({}), misfit.got) == (path, expected, "")


def test_keys_and_values_of_a_dict_are_told_apart():
    key, value = read({"biases": {"x": 1.0}}), read({"biases": {1: "x"}})
    assert (key.path, key.in_key, key.got) == ("biases", True, "str")
    assert (value.path, value.in_key, value.got) == ("biases[...]", False, "str")


def test_an_unknown_word():
    misfit = read({"mode": "c"})
    assert misfit.is_unknown_word and misfit.path == "mode" and not misfit.expected


@pytest.mark.parametrize("value,path", [({}, ""), ({"inner": {}}, "inner")])
def test_a_missing_field(value, path):
    misfit = read(value, _Outer if value else _Inner)
    assert (misfit.missing, misfit.unknown, misfit.path) == ("x", "", path)


@pytest.mark.parametrize("value,path", [({"y": 1}, ""), ({"inner": {"x": 1, "y": 1}}, "inner")])
def test_an_unknown_field(value, path):
    misfit = read(value)
    assert (misfit.missing, misfit.unknown, misfit.path) == ("", "y", path)


def test_the_whole_value_has_no_path():
    misfit = read([1])
    assert (misfit.path, misfit.expected, misfit.got) == ("", ["object"], "array")
