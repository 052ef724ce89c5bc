"""JSON lines hold every sample with the same bits; values that JSON lacks are converted, or refused in time."""

import datetime
import io
import json
import math
import os
from decimal import Decimal

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

from rollout_engine import RequestError, read_jsonl, to_jsonl
from rollout_engine.batches.jsonl import line_of
from rollout_engine.batches.layout import places

LAYOUTS = ["padded", "packed"]


def written(batch, path, **options):
    to_jsonl(batch, path, **options)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [False, True])
def test_every_sample_can_be_read_back_bit_for_bit(make_batch, tmp_path, layout, kept):
    batch = make_batch(2, layout, kept=kept)
    rows = written(batch, tmp_path / "rollouts.jsonl")
    where = places(batch)
    assert len(rows) == len(batch["seed"])
    for i, row in enumerate(rows):
        response = where.response[i]
        floats = {"log_probs": batch["log_probs", "response"][response]}
        if kept:
            floats["kept_logprob_mass"] = batch["kept_logprob_mass"][response]
        for name, expected in floats.items():
            assert torch.equal(torch.tensor(row[name], dtype=torch.float32), expected)
        assert np.float32(row["reward"]) == batch["next", "reward"][i].item()
        assert row["prompt_token_ids"] == batch["tokens", "prompt"][where.prompt[i]].tolist()
        assert row["prompt_token_ids"] + row["response_token_ids"] == batch["tokens", "full"][where.full[i]].tolist()
        for name in ("policy_version", "kv_min_version"):
            assert [-1] * len(row["prompt_token_ids"]) + row[name] == batch[name][where.full[i]].tolist()
        assert 0 <= row["seed"] == int(batch["seed"][i]) % 2**64
        assert (row["done"], row["truncated"]) == (not batch["truncated"][i], bool(batch["truncated"][i]))
        for name in ("finish_reason", "answer"):
            assert (row | row["columns"])[name] == batch[name][i]
        assert (row["prompt"], row["response"]) == (batch["text", "prompt"][i], batch["text", "response"][i])
    assert ("kept_logprob_mass" in rows[0]) == kept


def test_both_layouts_write_the_same_file(make_batch, tmp_path):
    padded, packed = (written(make_batch(4, layout), tmp_path / layout) for layout in LAYOUTS)
    assert padded == packed


def test_without_rewards_and_columns_there_are_none(make_batch, tmp_path):
    row = written(make_batch(rewards=False, columns=False), tmp_path / "file")[0]
    assert row["columns"] == {} and not {"reward", "done"} & set(row)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_the_user_added_are_columns(make_batch, tmp_path, layout):
    batch = make_batch(1, layout)
    batch["advantage"] = torch.randn(*batch["next", "reward"].shape)
    batch["mine"] = {"values": torch.randn(batch["tokens", "full"].shape)} if layout == "packed" else {}
    rows = written(batch, tmp_path / "file")
    assert [row["columns"]["advantage"] for row in rows] == batch["advantage"].tolist()
    if layout == "packed":
        values = [row["columns"]["mine.values"] for row in rows]
        assert values == [batch["mine", "values"][place].tolist() for place in places(batch).full]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_object_for_the_whole_batch_is_a_column_of_every_sample(make_batch, tmp_path, layout):
    batch = make_batch(1, layout)
    batch.set_non_tensor("run", "a name")
    rows = written(batch, tmp_path / "file")
    assert [row["columns"]["run"] for row in rows] == ["a name"] * len(rows)
    assert [row["columns"]["answer"] for row in rows] == list(batch["answer"])


def test_a_file_is_replaced_or_grows(make_batch, tmp_path):
    first, second = make_batch(0), make_batch(1)
    num = len(first["seed"]) + len(second["seed"])
    written(first, tmp_path / "file")
    assert len(written(second, tmp_path / "file", append=True)) == num
    assert len(written(second, tmp_path / "file")) == len(second["seed"])


def test_an_open_file_will_do(make_batch):
    file = io.StringIO()
    to_jsonl(make_batch(), file)
    assert not file.closed and file.getvalue().count("\n") == len(make_batch()["seed"])


class Silent:
    def __str__(self):
        raise ValueError("no words")


def nested(depth):
    return [nested(depth - 1)] if depth else 0


DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]
ODD = [
    (float("nan"), "nan"),
    ([1.5, math.inf], [1.5, "inf"]),
    ({2, 1, "a"}, ["a", 1, 2]),
    ({"deep": [b"bytes"], "date": datetime.date(2026, 1, 2)}, {"deep": ["b'bytes'"], "date": "2026-01-02"}),
    ({(1, 2): Decimal("1.5"), 3: None}, {"(1, 2)": "1.5", "3": None}),
    (torch.tensor([math.nan, 2.0]), ["nan", 2.0]),
    (Silent(), "<Silent: no words>"),
    (10**5000, hex(10**5000)),
]


@pytest.mark.parametrize("value, expected", ODD, ids=lambda value: type(value).__name__)
def test_values_of_columns_that_json_lacks_are_written_another_way_and_named_once(
    make_batch, tmp_path, caplog, value, expected
):
    batch = make_batch()
    batch["odd"] = NonTensorStack(*[1] * (len(batch["seed"]) - 2), value, value)
    rows = written(batch, tmp_path / "file")
    assert [row["columns"]["odd"] for row in rows[-3:]] == [1, expected, expected]
    assert [row["columns"]["odd"] for row in read_jsonl(tmp_path / "file")[-2:]] == [expected] * 2
    [record] = caplog.records
    assert record.getMessage().startswith("to_jsonl: columns['odd']=") and record.levelname == "WARNING"


def test_a_value_that_is_nested_too_deep_is_a_text_from_some_depth_on(make_batch, tmp_path):
    batch = make_batch(num_groups=1, num_samples=2)
    batch["odd"] = NonTensorStack({"deep": DEEP}, nested(100))
    first, second = (row["columns"]["odd"] for row in written(batch, tmp_path / "file"))
    assert second == nested(100)
    for _ in range(64):
        first = first["deep"] if isinstance(first, dict) else first[0]
    assert first.startswith("<list: maximum recursion depth exceeded")


def test_a_number_of_the_rollouts_own_that_is_not_finite_is_refused_and_the_old_file_stays(make_batch, tmp_path):
    batch = make_batch()
    written(batch, tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    batch["log_probs", "response"][-1, 0] = math.nan
    with pytest.raises(RequestError, match=r"log_probs of group 2, sample \d=.*not JSON compliant"):
        to_jsonl(batch, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_pipe_is_appended_to(make_batch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        to_jsonl(make_batch(num_groups=1, num_samples=2), tmp_path / "pipe", append=True)
        assert os.read(reader, 1 << 20).count(b"\n") == 2
    finally:
        os.close(reader)


def test_appending_ends_a_line_that_was_cut_off(make_batch, tmp_path):
    batch = make_batch(num_groups=1, num_samples=2)
    (tmp_path / "file").write_text('{"group_id": 1, "cut')
    to_jsonl(batch, tmp_path / "file", append=True)
    assert len(read_jsonl(tmp_path / "file")) == 2


def test_arrays_and_tensors_in_columns_are_lists(make_batch, tmp_path):
    batch = make_batch(num_groups=1, num_samples=2)
    batch["mixed"] = NonTensorStack({"a": np.float32(0.1)}, {"b": torch.tensor([1, 2])})
    rows = written(batch, tmp_path / "file")
    assert [row["columns"]["mixed"] for row in rows] == [{"a": float(np.float32(0.1))}, {"b": [1, 2]}]


@pytest.mark.parametrize(
    "value",
    [
        [1.5, -0.0, 5e-324, 1.7976931348623157e308, 1e16, 0.1, -3],
        [1.7976931348623157e308] * 2,
        [2**70, 2**63, -(2**70)],
        [True, 1],
        [1, None, "é\u2028"],
        [[1, 2], [3]],
        [],
        "\ud800",
        {"a": [1.0]},
        0,
    ],
    ids=repr,
)
def test_a_line_says_what_json_would(value):
    read = json.loads(line_of({"columns": {}, "value": value}))
    assert repr(read) == repr({"columns": {}, "value": value})


@pytest.mark.parametrize("value", [[1.0, math.nan], [math.inf], [-math.inf, math.inf]], ids=repr)
def test_numbers_that_json_does_not_have_are_no_line(value):
    with pytest.raises(RequestError, match="^value of group 0, sample 1=.*not JSON compliant"):
        line_of({"group_id": 0, "sample_index": 1, "columns": {}, "value": value})


def test_half_a_surrogate_pair_is_written_to_a_file_and_read_back(make_batch, tmp_path):
    batch = make_batch(num_groups=1, num_samples=2)
    batch["odd"] = NonTensorStack("a\ud800\\", "\udfff\u20ac")
    assert [row["columns"]["odd"] for row in written(batch, tmp_path / "file")] == ["a\ud800\\", "\udfff\u20ac"]
