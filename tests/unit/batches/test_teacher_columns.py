"""Columns of teachers stay with their tokens, and make advantages."""

import json
import math

import pytest
import torch

from rollout_engine import advantages, concat, minibatches, to_jsonl
from rollout_engine.base.errors import RequestError
from rollout_engine.batches.layout import full_places


def with_teacher(batch, k=2, name="big"):
    """The batch with columns whose values depend on their tokens."""
    tokens, sampled = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
    batch["teacher", name, "log_probs"] = -tokens.float().where(sampled, torch.tensor(0.0))
    ids = torch.stack([tokens + i for i in range(k)], -1)
    batch["teacher", name, "top_ids"] = ids.where(sampled[..., None], torch.tensor(-1))
    batch["teacher", name, "top_log_probs"] = (-ids.float()).where(sampled[..., None], torch.tensor(-torch.inf))
    return batch


def check(batch, k=2):
    tokens, sampled = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
    of = batch["teacher", "big"]
    assert torch.equal(of["log_probs"][sampled], -tokens[sampled].float()) and not of["log_probs"][~sampled].any()
    assert torch.equal(of["top_ids"][sampled][:, 0], tokens[sampled]) and (of["top_ids"][~sampled] == -1).all()
    assert (of["top_log_probs"][~sampled] == -torch.inf).all() and of["top_ids"].shape[-1] == k


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_columns_follow_their_tokens_through_minibatches_and_concat(make_batch, layout):
    whole = with_teacher(make_batch(1, layout, num_groups=4))
    parts = list(minibatches(whole, 3, generator=torch.Generator().manual_seed(0)))
    for part in parts:
        check(part)
    check(concat([whole, with_teacher(make_batch(2, layout, num_groups=2)), *parts], group_ids="keep"))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_width_of_teachers_top_tokens_becomes_the_largest(make_batch, layout):
    joined = concat([with_teacher(make_batch(1, layout), k=1), with_teacher(make_batch(2, layout), k=3)])
    check(joined, k=3)


def test_a_batch_without_a_teacher_of_the_others_is_refused(make_batch):
    with pytest.raises(RequestError, match=r"\('teacher', 'big', 'log_probs'\)"):
        concat([with_teacher(make_batch(1)), make_batch(2)])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_lines_have_teachers_next_to_the_response(make_batch, layout, tmp_path):
    batch = with_teacher(make_batch(3, layout))
    batch["teacher", "big", "log_probs"][full_places(batch)[0]] = torch.nan  # it failed there
    to_jsonl(batch, tmp_path / "lines.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        own, of = line["response_token_ids"], line["teacher"]["big"]
        assert of["log_probs"] == ([None] * len(own) if number == 0 else [-token for token in own])
        assert of["top_ids"] == [[token, token + 1] for token in own] and line["columns"].keys() == {"answer"}


def test_reverse_kl_is_what_the_teacher_finds_likelier():
    own = torch.tensor([[0.0, -1.0, -2.0, -1.0], [0.0, -3.0, 0.0, 0.0]])
    other = torch.tensor([[9.0, -0.5, -4.0, -1.0], [9.0, -1.0, 7.0, 7.0]])
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    found = advantages.reverse_kl(own, other, mask, coefficient=2.0)
    assert found.tolist() == [[0.0, 1.0, -4.0, 0.0], [0.0, 4.0, 0.0, 0.0]]
    whole = advantages.reverse_kl(own, other, mask, discount=1.0)
    assert whole.tolist() == [[0.0, -1.5, -2.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    half = advantages.reverse_kl(own, other, mask, discount=0.5)
    assert half.tolist() == [[0.0, -0.5, -2.0, 0.0], [0.0, 2.0, 0.0, 0.0]]


def test_tokens_of_an_environment_are_skipped():
    own, other = torch.zeros(1, 4), torch.tensor([[1.0, 100.0, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    of_one = torch.tensor([0, 4])
    found = advantages.reverse_kl(own, other, mask, discount=0.5, cu_seqlens=of_one)
    assert found.tolist() == [[3.0, 0.0, 4.0, 4.0]]
    with pytest.raises(RequestError, match=r"cu_seqlens=None .* torch.tensor\(\[0, 4\]\)"):
        advantages.reverse_kl(own, other, mask, discount=0.5)
    assert advantages.reverse_kl(own, other, mask).tolist() == [[1.0, 0.0, 2.0, 4.0]]


def test_reverse_kl_of_packed_rows_is_that_of_padded_ones(make_batch):
    padded, packed = (with_teacher(make_batch(5, layout)) for layout in ("padded", "packed"))
    found = [
        advantages.reverse_kl(
            batch["log_probs", "full"],
            batch["teacher", "big", "log_probs"],
            batch["masks", "all_assistant_mask"],
            discount=0.9,
            cu_seqlens=batch["cu_seqlens"] if "cu_seqlens" in batch.keys() else None,
        )
        for batch in (padded, packed)
    ]
    rows = [found[0][place] for place in full_places(padded)]
    assert torch.equal(torch.cat(rows), found[1][0])


def test_a_teacher_that_failed_makes_no_advantages():
    own, mask = torch.zeros(1, 3), torch.tensor([[False, True, True]])
    failed = torch.tensor([[math.nan, 0.0, math.nan]])
    with pytest.raises(RequestError, match=r"teacher_logprobs='nan at \[0, 2\]' is not allowed: must be finite"):
        advantages.reverse_kl(own, failed, mask)
    for others, words in ((torch.zeros(1, 4), "teacher_logprobs.shape"), (torch.zeros(2, 3), "teacher_logprobs.shape")):
        with pytest.raises(RequestError, match=words):
            advantages.reverse_kl(own, others, mask)
    with pytest.raises(RequestError, match="discount"):
        advantages.reverse_kl(own, own, mask, discount=2.0)
