"""A rollout prints itself in one screen, and is a TensorDict like any other in everything else."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree

from rollout_engine.batches import summary
from rollout_engine.batches.episodes import episodes
from rollout_engine.batches.summary import RolloutBatch


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_rollout_is_printed_on_one_screen(make_batch, layout):
    batch = make_batch(layout=layout, kept=True, num_groups=40)
    lines = repr(batch).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 120
    assert str(batch) == repr(batch)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_is_printed_is_what_the_batch_holds(make_batch, layout):
    batch = make_batch(layout=layout)
    text = repr(batch)
    num_sampled = int(batch["masks", "all_assistant_mask"].sum())
    first = f"RolloutBatch, {layout}: sequences {len(batch['seed'])}, groups 3, sampled tokens {num_sampled}, "
    assert text.startswith(first + "policy version 1 to 2\n")
    for reason in set(batch["finish_reason"]):
        assert f"{reason} {list(batch['finish_reason']).count(reason)}" in text
    assert f"reward: mean {batch['next', 'reward'].mean():.4g}, from " in text
    assert "first: 'prompt 0 0' -> 'répónse " in text
    assert f"{list(batch['tokens', 'full'].shape)} int64" in text
    assert all(name in text for key in batch.keys(True) for name in ([key] if isinstance(key, str) else key))


def test_keys_of_the_users_own_are_printed_up_to_a_limit(make_batch):
    batch = make_batch()
    batch["advantage"] = torch.zeros(*batch["next", "reward"].shape)
    assert f"advantage          {list(batch['next', 'reward'].shape)} float32" in repr(batch)
    for i in range(100):
        batch[f"extra_{i}"] = torch.zeros(*batch.batch_size)
    assert len(repr(batch).splitlines()) <= 32 and repr(batch).endswith("more keys")


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch[0],
        lambda batch: batch[:0],
        lambda batch: batch[:4].reshape(2, 2),
        lambda batch: torch.stack([batch, batch]),
        lambda batch: batch.select("tokens"),
        lambda batch: batch.exclude("group_id"),
        lambda batch: batch.empty(),
        lambda batch: batch.to("meta"),
    ],
)
def test_whatever_has_become_of_it_can_be_printed(make_batch, change):
    assert repr(change(make_batch(num_samples=2))).startswith("RolloutBatch, ")


@pytest.mark.parametrize(
    "operation",
    [
        lambda batch: batch[1:3],
        lambda batch: batch[torch.tensor([2, 0])],
        lambda batch: batch[batch["truncated"].squeeze(1)],
        lambda batch: batch.to(torch.device("cpu")),
        lambda batch: batch[:4].reshape(2, 2),
        lambda batch: torch.stack([batch, batch]),
        lambda batch: torch.cat([batch, batch]),
        lambda batch: batch.split(2)[0],
        lambda batch: batch.clone(),
        lambda batch: copy.deepcopy(batch),
        lambda batch: batch.select("tokens", "masks"),
        lambda batch: batch.apply(lambda leaf: leaf + 1),
        lambda batch: next(iter(batch)),
        lambda batch: pytree.tree_map(lambda leaf: leaf + 1, batch.select("tokens", "next")),
    ],
)
def test_tensordict_operations_give_what_a_tensordict_gives(make_batch, operation):
    batch = make_batch(num_samples=2)
    changed, expected = operation(batch), operation(TensorDict(dict(batch.items()), batch_size=batch.batch_size))
    assert type(changed) is RolloutBatch and type(expected) is TensorDict
    assert changed.batch_size == expected.batch_size
    assert (changed.to_tensordict() == expected).all()


def test_files_hold_a_plain_tensordict(make_batch, tmp_path):
    tensors = make_batch().select("tokens", "masks", "log_probs", "seed")
    tensors.memmap(tmp_path / "mapped")
    tensors.clone().memmap_(tmp_path / "mapped in place")
    assert type(TensorDict.load_memmap(tmp_path / "mapped")) is TensorDict
    for name in ("mapped", "mapped in place"):
        assert (TensorDict.load_memmap(tmp_path / name).to_tensordict() == tensors.to_tensordict()).all()


def test_a_function_may_be_mapped_over_its_rows(make_batch):
    tokens = make_batch().select("tokens")
    sums = torch.vmap(lambda row: row["tokens", "full"].sum())(tokens)
    assert torch.equal(sums, tokens["tokens", "full"].sum(1))


def test_group_ids_of_episodes_are_read_without_a_recursion(make_batch, monkeypatch):
    batch, calls = make_batch(0, num_groups=2, num_samples=2), []
    batch["episode_id"] = torch.tensor([0, 0, 1, 1])
    monkeypatch.setattr(summary, "episodes", lambda given: calls.append(1) or episodes(given))
    assert batch["group_id"].tolist() == [0, 0, 1, 1] and len(calls) == 1
