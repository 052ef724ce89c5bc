"""Every bound of `SamplingParams` is checked when it is made, and the error says which."""

import math

import msgspec
import pytest

from rollout_engine import RequestError, SamplingParams


@pytest.mark.parametrize(
    "field, value, bound",
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", math.inf, "a finite number >= 0"),
        ("temperature", math.nan, "a finite number >= 0"),
        ("top_p", 0.0, "in (0, 1]"),
        ("min_p", 1.1, "in [0, 1]"),
        ("seed", 2**64, "in [-2**63, 2**64)"),
        ("seed", -(2**63) - 1, "in [-2**63, 2**64)"),
        ("repetition_penalty", 0.0, "in [0.01, 100]"),
        ("repetition_penalty", 100.5, "in [0.01, 100]"),
        ("repetition_penalty", math.nan, "in [0.01, 100]"),
        ("presence_penalty", 2.5, "in [-2, 2]"),
        ("presence_penalty", math.nan, "in [-2, 2]"),
        ("frequency_penalty", -2.5, "in [-2, 2]"),
        ("allowed_token_ids", [], "at least one id, or None"),
        ("allowed_token_ids", [3, -1], "token ids >= 0"),
        ("allowed_token_ids", [2**31], "token ids >= 0"),
        ("allowed_token_ids", [7] * (2**20 + 1), "at most 1048576 ids"),
        ("stop_token_ids", [-1], "token ids >= 0"),
        ("stop_token_ids", [1] * 1_025, "at most 1024 ids"),
        ("stop", [""], "strings of 1 to 1024 characters"),
        ("stop", ["x"] * 65, "at most 64 strings"),
        ("bad_words", [""], "strings of 1 to 1024 characters"),
        ("bad_words", ["x" * 1_025], "strings of 1 to 1024 characters"),
        ("bad_words", ["x"] * 1_025, "at most 1024 strings"),
        ("logit_bias", {-1: 1.0}, "token ids >= 0"),
        ("logit_bias", dict.fromkeys(range(1_025), 0.0), "at most 1024 ids"),
        ("extra_args", {"a": object()}, "plain data"),
        ("extra_args", {"a": (1, 2)}, "plain data"),
        ("extra_args", {"a": {1: 2}}, "plain data"),
        ("extra_args", {"a": 2**64}, "plain data"),
        ("extra_args", {"a": "x" * 70_000}, "at most 65536 bytes"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_field_and_bound(field, value, bound):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert bound in caught.value.bound


@pytest.mark.parametrize("bias", [100.5, -100.5, math.inf, math.nan])
def test_a_bias_out_of_bounds_is_refused_never_clamped(bias):
    with pytest.raises(RequestError, match=r"logit_bias\[7\]=.* is not allowed: must be in \[-100, 100\]"):
        SamplingParams(logit_bias={5: -100, 7: bias})


@pytest.mark.parametrize("field, most", [("logprobs", 64), ("prompt_logprobs", 1024)])
def test_more_top_logprobs_than_a_step_finds_are_refused(field, most):
    assert getattr(SamplingParams(**{field: most}), field) == most
    with pytest.raises(RequestError, match=f"{field}={most + 1} is not allowed: must be an int <= {most}"):
        SamplingParams(**{field: most + 1})


@pytest.mark.parametrize(
    "field, value",
    [("logit_bias", {"5": 1.0}), ("bad_words", 5), ("allowed_token_ids", [1.5]), ("extra_args", [])],
)
def test_a_value_of_another_type_is_refused(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_nesting_without_end_is_refused():
    nested: list = []
    nested.append(nested)
    with pytest.raises(RequestError, match="extra_args"):
        SamplingParams(extra_args={"a": nested})


def test_bounds_themselves_are_allowed_and_survive_the_wire():
    params = SamplingParams(
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100, 5: 100},
        allowed_token_ids=[0],
        bad_words=["x"],
        prompt_logprobs=64,
        extra_args={"a": [1, 2.5, None, True, {"b": "c"}]},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
