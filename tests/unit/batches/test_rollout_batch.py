"""The TensorDict holds exactly the outputs' values, in both layouts."""

import random

import numpy as np
import pytest
import torch

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput, VersionSpan
from rollout_engine.batches.layout import RESERVED_KEYS
from rollout_engine.batches.rollout_batch import rollout_batch

PAD = 99


def completion(index, tokens, *, spans=None, kept=False, seed=0, logprobs=True, finish_reason="stop"):
    values = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return CompletionOutput(
        index=index,
        text=f"text {tokens}",
        token_ids=list(tokens),
        logprobs=values if logprobs else None,
        top_logprobs=None,
        cumulative_logprob=float(values.sum()),
        kept_logprob_mass=values / 10 if kept else None,
        finish_reason=finish_reason,
        stop_reason=None,
        version_spans=spans if spans is not None else [VersionSpan(0, len(tokens), 4, 4)],
        seed=seed,
    )


def result(name, prompt, completions):
    return RequestOutput(name, f"prompt {name}", list(prompt), None, completions, True, 0)


def two_groups():
    spans = [VersionSpan(0, 1, 4, 4), VersionSpan(1, 3, 5, 4)]
    return [
        result("a", [1, 2], [completion(0, [11, 12, 13], spans=spans, seed=2**64 - 1), completion(1, [14], seed=7)]),
        result("b", [3, 4, 5], [completion(0, [15, 16]), completion(1, [])]),
    ]


def random_results(rng):
    results = []
    for name in range(rng.randint(1, 5)):
        completions = []
        for index in range(rng.randint(1, 4)):
            tokens = [rng.randrange(90) for _ in range(rng.randrange(9))]
            cut = rng.randint(0, len(tokens))
            spans = [VersionSpan(0, cut, 1, 1), VersionSpan(cut, len(tokens), 2, rng.choice([1, 2]))]
            completions.append(
                completion(index, tokens, spans=[s for s in spans if s.start < s.end], kept=rng.random() < 0.5)
            )
        results.append(result(str(name), [rng.randrange(90) for _ in range(rng.randint(1, 6))], completions))
    return results


def test_padded_tokens_and_masks():
    batch = rollout_batch(two_groups(), pad_token_id=PAD)
    assert batch.batch_size == (4,)
    assert batch["tokens", "prompt"].tolist() == [[PAD, 1, 2], [PAD, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert batch["tokens", "response"].tolist() == [[11, 12, 13], [14, PAD, PAD], [15, 16, PAD], [PAD, PAD, PAD]]
    assert batch["tokens", "full"].tolist() == [
        [1, 2, 11, 12, 13],
        [1, 2, 14, PAD, PAD],
        [3, 4, 5, 15, 16],
        [3, 4, 5, PAD, PAD],
    ]
    assert batch["masks", "all_attention_mask"].sum(1).tolist() == [5, 3, 5, 3]
    assert batch["masks", "all_assistant_mask"].int().tolist() == [
        [0, 0, 1, 1, 1],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0],
    ]
    assert batch["masks", "prompt"].int().tolist() == [[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert batch["num_prompt_tokens"].tolist() == [2, 2, 3, 3]
    assert batch["masks", "response"].int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_log_probs_and_versions_stand_under_their_tokens():
    batch = rollout_batch(two_groups(), pad_token_id=PAD)
    assert batch["log_probs", "response"].tolist() == [[-1, -2, -3], [-1, 0, 0], [-1, -2, 0], [0, 0, 0]]
    assert batch["log_probs", "full"].tolist()[0] == [0, 0, -1, -2, -3]
    assert batch["policy_version"].tolist()[:2] == [[-1, -1, 4, 5, 5], [-1, -1, 4, -1, -1]]
    assert batch["kv_min_version"].tolist()[0] == [-1, -1, 4, 4, 4]


def test_per_sequence_keys():
    batch = rollout_batch(two_groups(), pad_token_id=PAD, columns={"answer": ["x", {"deep": [1]}]}, group_ids=[8, 9])
    assert batch["group_id"].tolist() == [8, 8, 9, 9]
    assert batch["sample_index"].tolist() == [0, 1, 0, 1]
    assert list(batch["finish_reason"]) == ["stop"] * 4
    assert list(batch["answer"]) == ["x", "x", {"deep": [1]}, {"deep": [1]}]
    assert list(batch["text", "prompt"]) == ["prompt a", "prompt a", "prompt b", "prompt b"]
    assert batch[1]["text", "response"] == "text [14]"


def test_seeds_are_bit_patterns_of_the_unsigned_number():
    seeds = rollout_batch(two_groups(), pad_token_id=PAD)["seed"]
    assert seeds.tolist()[:2] == [-1, 7]
    assert int(seeds[0]) % 2**64 == 2**64 - 1


def test_dtypes():
    batch = rollout_batch(two_groups(), pad_token_id=PAD, rewards=[[1, 0], [0.5, 2]])
    int64 = [("tokens", "prompt"), ("tokens", "response"), ("tokens", "full"), "policy_version", "kv_min_version"]
    assert {batch[key].dtype for key in [*int64, "group_id", "sample_index", "seed", "num_prompt_tokens"]} == {
        torch.int64
    }
    assert {batch["masks", key].dtype for key in batch["masks"].keys()} == {torch.bool}
    assert {batch["log_probs", key].dtype for key in ("response", "full")} == {torch.float32}
    assert batch["next", "reward"].dtype == torch.float32
    assert batch["next", "done"].dtype == batch["truncated"].dtype == torch.bool


def test_rewards_are_columns_of_one():
    batch = rollout_batch(two_groups(), pad_token_id=PAD, rewards=[[1, 0], [0.5, 2]])
    assert batch["next", "reward"].tolist() == [[1], [0], [0.5], [2]]
    assert batch["next", "done"].tolist() == [[True]] * 4
    assert "next" not in rollout_batch(two_groups(), pad_token_id=PAD).keys()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_done_is_what_ended_by_itself_and_truncated_is_what_was_cut(layout):
    reasons = ["stop", "length", "abort", "stop"]
    samples = [completion(i, [i], finish_reason=reason) for i, reason in enumerate(reasons)]
    batch = rollout_batch([result("a", [1], samples)], pad_token_id=PAD, rewards=[[0.0] * 4], layout=layout)
    assert batch["next", "done"].tolist() == [[True], [False], [False], [True]]
    assert batch["truncated"].tolist() == [[False], [True], [True], [False]]
    without = rollout_batch([result("a", [1], samples)], pad_token_id=PAD, layout=layout)
    assert torch.equal(without["truncated"], batch["truncated"])


def test_kept_mass_is_there_only_when_something_was_cut():
    assert "kept_logprob_mass" not in rollout_batch(two_groups(), pad_token_id=PAD).keys()
    mixed = [result("a", [1], [completion(0, [5, 6], kept=True), completion(1, [7])])]
    kept = rollout_batch(mixed, pad_token_id=PAD)["kept_logprob_mass"]
    assert torch.equal(kept, torch.tensor([[-0.1, -0.2], [0.0, 0.0]]))


@pytest.mark.parametrize("seed", range(20))
def test_packed_is_padded_without_the_padding(seed):
    results = random_results(random.Random(seed))
    padded, packed = (rollout_batch(results, pad_token_id=PAD, layout=layout) for layout in ("padded", "packed"))
    attention, response = padded["masks", "all_attention_mask"], padded["masks", "response"]
    assert packed.batch_size == ()
    assert packed["cu_seqlens"].dtype == torch.int32
    assert packed["cu_seqlens"].diff().tolist() == attention.sum(1).tolist()
    for key in [
        ("tokens", "full"),
        ("masks", "all_assistant_mask"),
        ("log_probs", "full"),
        "policy_version",
        "kv_min_version",
    ]:
        assert torch.equal(packed[key], padded[key][attention][None]), key
    for key in [("tokens", "response"), ("log_probs", "response"), ("masks", "response")]:
        assert torch.equal(packed[key], padded[key][response][None]), key
    assert packed["masks", "all_attention_mask"].all()
    assert packed["tokens", "prompt"].tolist() == [[t for r in results for _ in r.outputs for t in r.prompt_token_ids]]
    assert torch.equal(packed["seed"], padded["seed"])
    assert set(packed.keys()) == set(padded.keys()) | {"cu_seqlens"}


@pytest.mark.parametrize("seed", range(20))
def test_every_token_can_be_read_back(seed):
    results = random_results(random.Random(100 + seed))
    batch = rollout_batch(results, pad_token_id=PAD)
    samples = [(r, c) for r in results for c in r.outputs]
    for row, (request, sample) in enumerate(samples):
        full = batch["tokens", "full"][row][batch["masks", "all_attention_mask"][row]]
        assert full.tolist() == request.prompt_token_ids + sample.token_ids
        mask = batch["masks", "all_assistant_mask"][row]
        assert batch["tokens", "full"][row][mask].tolist() == sample.token_ids
        versions = [v for s in sample.version_spans for v in [(s.policy_version, s.kv_min_version)] * (s.end - s.start)]
        got = torch.stack([batch["policy_version"][row][mask], batch["kv_min_version"][row][mask]], 1)
        assert [tuple(v) for v in got.tolist()] == versions


def test_results_without_log_probs_are_refused():
    with pytest.raises(RequestError, match="logprobs=None is not allowed"):
        rollout_batch([result("a", [1], [completion(0, [5], logprobs=False)])], pad_token_id=PAD)


def test_an_unknown_layout_is_refused():
    with pytest.raises(RequestError, match="layout='ragged' is not allowed: must be 'padded' or 'packed'"):
        rollout_batch(two_groups(), pad_token_id=PAD, layout="ragged")


def test_every_key_it_writes_is_reserved():
    rewards = [[1, 0], [0, 1]]
    options = {"rewards": rewards, "function_rewards": {"exact": rewards}, "oversampled": True, "layout": "packed"}
    batch = rollout_batch(two_groups(), pad_token_id=PAD, **options)
    others = {"kept_logprob_mass", "routed_experts", "pictures", "entropy", "top_k", "hidden_states", "support"}
    others |= {"teacher", "picture_features"}
    assert set(batch.keys()) | others == RESERVED_KEYS


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_routed_experts_stand_at_their_tokens_and_minus_one_elsewhere(layout):
    results = [result("a", [1, 2], [completion(0, [5, 6]), completion(1, [7])])]
    results[0].outputs[0].routed_experts = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)  # the other has none
    batch = rollout_batch(results, pad_token_id=PAD, layout=layout)
    rows = batch["routed_experts"].reshape(-1, 2).tolist()
    assert rows[:4] == [[0, 1], [2, 3], [4, 5], [-1, -1]] and rows[4:] == [[-1, -1]] * (4 if layout == "padded" else 3)
    assert batch["routed_experts"].dtype == torch.int16
