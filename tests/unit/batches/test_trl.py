"""Rollouts in TRL's shapes: padding sides, dtypes, and nothing else in them."""

import pytest
import torch

from rollout_engine import RequestError, to_trl, to_trl_rollout
from rollout_engine.batches.layout import places

LAYOUTS = ["padded", "packed"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_prompts_are_padded_left_and_completions_right(make_batch, layout, seed):
    batch = make_batch(seed, layout)
    inputs, where = to_trl(batch), places(batch)
    num = len(batch["seed"])
    for name, spans in (("prompt", where.prompt), ("completion", where.response)):
        ids, mask, key = inputs[f"{name}_ids"], inputs[f"{name}_mask"], "prompt" if name == "prompt" else "response"
        lengths = [columns.stop - columns.start for _, columns in spans]
        assert ids.dtype == mask.dtype == torch.int64
        assert ids.shape == mask.shape == (num, max(lengths))
        for row, n in enumerate(lengths):
            zeros, ones = [0] * (max(lengths) - n), [1] * n
            assert mask[row].tolist() == (zeros + ones if name == "prompt" else ones + zeros)
            assert ids[row][mask[row].bool()].tolist() == batch["tokens", key][spans[row]].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_stand_under_their_completions(make_batch, layout):
    batch = make_batch(3, layout)
    inputs = to_trl(batch)
    mask, where = inputs["completion_mask"].bool(), places(batch).response
    for name in ("old_per_token_logps", "sampling_per_token_logps"):
        assert inputs[name].dtype == torch.float32 and (inputs[name][~mask] == 0).all()
        expected = torch.cat([batch["log_probs", "response"][place] for place in where])
        assert torch.equal(inputs[name][mask], expected)
    assert inputs["num_items_in_batch"] == mask.sum() and inputs["num_items_in_batch"].shape == ()
    assert not {"advantages", "tool_mask"} & set(inputs)


def test_both_layouts_give_the_same(make_batch):
    padded, packed = (to_trl(make_batch(5, layout)) for layout in LAYOUTS)
    for name in padded:
        under = {"prompt_ids": "prompt_mask", "completion_ids": "completion_mask"}.get(name)
        real = padded[under].bool() if under else torch.ones_like(padded[name], dtype=torch.bool)  # padding ids differ
        assert torch.equal(padded[name][real], packed[name][real])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_are_given_or_found(make_batch, layout):
    batch = make_batch(1, layout)
    advantages = torch.randn(len(batch["seed"]), dtype=torch.float64)
    for inputs in (to_trl(batch, advantages), to_trl(batch, advantages[:, None])):
        assert torch.equal(inputs["advantages"], advantages.float())
    batch["advantage"] = advantages[:, None]
    assert torch.equal(to_trl(batch)["advantages"], advantages.float())
    with pytest.raises(RequestError, match=r"advantages.shape=\[1\] is not allowed: must be \[\d+\] or \[\d+, 1\]"):
        to_trl(batch, torch.zeros(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_are_left_out_of_the_mask_are_left_out_of_the_loss(make_batch, layout):
    batch = make_batch(2, layout, num_samples=2)
    where = places(batch)
    row = next(row for row, (_, columns) in enumerate(where.response) if columns.stop - columns.start > 1)
    at, columns = where.full[row]
    batch["masks", "all_assistant_mask"][at, columns.start + batch["num_prompt_tokens"][row]] = False
    inputs = to_trl(batch)
    assert inputs["tool_mask"].dtype == torch.int64 and inputs["tool_mask"].shape == inputs["completion_ids"].shape
    assert (inputs["tool_mask"] == 0).nonzero().tolist() == [[row, 0]]
    assert inputs["num_items_in_batch"] == inputs["completion_mask"].sum() - 1
    assert to_trl_rollout(batch)["env_mask"][row][:2] == [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollout_func_gets_lists_without_padding(make_batch, layout):
    batch = make_batch(6, layout)
    lists, inputs = to_trl_rollout(batch), to_trl(batch)
    assert set(lists) == {"prompt_ids", "completion_ids", "logprobs"}
    for name, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        assert lists[name] == [ids[on.bool()].tolist() for ids, on in zip(inputs[name], inputs[mask], strict=True)]
    assert [len(row) for row in lists["logprobs"]] == [len(row) for row in lists["completion_ids"]]


def test_a_batch_of_nothing_is_refused(make_batch):
    with pytest.raises(RequestError, match="number of sequences=0 is not allowed: must be at least 1"):
        to_trl(make_batch()[:0])
