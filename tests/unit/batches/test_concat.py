"""Concatenation changes no sequence; minibatches hold each exactly once."""

import pytest
import torch

from rollout_engine import RequestError, concat, minibatches
from rollout_engine.base.provenance import RolloutNote, attach, rollout_note
from rollout_engine.batches.layout import leaves, places
from rollout_engine.batches.summary import RolloutBatch

LAYOUTS = ["padded", "packed"]
TENSORS = ["seed", "sample_index", "num_prompt_tokens", "truncated", ("next", "reward"), ("next", "done")]
OBJECTS = ["finish_reason", ("text", "prompt"), ("text", "response"), "answer"]
PER_TOKEN = {
    "full": [("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask"), "policy_version"],
    "response": [("tokens", "response"), ("log_probs", "response"), ("masks", "response")],
    "prompt": [("tokens", "prompt"), ("masks", "prompt")],
}


def sequences(batch, *more):
    """Each sequence's values as plain objects, without padding."""
    found = []
    for row, spans in enumerate(zip(*places(batch), strict=True)):
        each = {key: batch[key][row].tolist() for key in TENSORS} | {key: list(batch[key])[row] for key in OBJECTS}
        for span, (at, columns) in zip(("prompt", "response", "full"), spans, strict=True):
            each |= {key: batch[key][at, columns].tolist() for key in PER_TOKEN[span]}
        found.append(each | {key: batch[key][row].tolist() for key in more})
    return found


def same(batch, expected):
    mine, theirs = dict(leaves(batch)), dict(leaves(expected))
    assert type(batch) is RolloutBatch and batch.batch_size == expected.batch_size and set(mine) == set(theirs)
    for key, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[key].dtype and torch.equal(value, theirs[key]), key
        else:
            assert list(batch[key]) == list(expected[key]), key


@pytest.mark.parametrize("seed", range(10))
def test_both_layouts_say_where_each_sequence_lies(make_batch, seed):
    padded, packed = (make_batch(seed, layout) for layout in LAYOUTS)
    assert sequences(padded) == sequences(packed)
    for in_padded, in_packed in zip(places(padded), places(packed), strict=True):
        assert [span.stop - span.start for _, span in in_padded] == [span.stop - span.start for _, span in in_packed]


@pytest.mark.quick(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(10))
def test_joined_rollouts_hold_the_same_sequences(make_batch, layout, seed):
    parts = [make_batch(10 * seed + i, layout, num_groups=1 + i) for i in range(3)]
    joined = concat(parts)
    assert sequences(joined) == [each for part in parts for each in sequences(part)]
    assert type(joined) is RolloutBatch and set(joined.keys(True, True)) == set(parts[0].keys(True, True))
    for key, value in leaves(joined):
        if isinstance(value, torch.Tensor):
            assert value.dtype == parts[0][key].dtype, key
    if layout == "padded":
        real = joined["masks", "all_attention_mask"]
        assert (joined["tokens", "full"][~real] == 99).all() and (joined["policy_version"][~real] == -1).all()
        assert (joined["tokens", "prompt"][~joined["masks", "prompt"]] == 99).all()
        assert torch.equal(real.sum(1), torch.cat([part["masks", "all_attention_mask"].sum(1) for part in parts]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_different_rollouts_stay_different(make_batch, layout):
    first, second = make_batch(0, layout, num_groups=2, num_samples=2), make_batch(1, layout, 1, 3)
    second["group_id"] += 7
    assert concat([first, second])["group_id"].tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert concat(iter([second, first]))["group_id"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert concat([first, second], group_ids="keep")["group_id"].tolist() == [0, 0, 1, 1, 7, 7, 7]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_rollout_make_it_whole_again(make_batch, layout):
    batch = make_batch(3, layout, num_groups=5, kept=True)
    same(concat(minibatches(batch, 3), group_ids="keep"), batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_was_cut_where_kept_mass_is_missing(make_batch, layout):
    joined = concat([make_batch(0, layout, kept=True), make_batch(1, layout)])
    num_first = len(make_batch(0, layout)["seed"])
    masses = [joined["kept_logprob_mass"][place] for place in places(joined).response]
    assert all((mass == 0).all() for mass in masses[num_first:]) and any(
        (mass < 0).any() for mass in masses[:num_first]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_the_users_own_are_joined_and_cut(make_batch, layout):
    parts = [make_batch(seed, layout) for seed in range(3)]
    for part in parts:
        part["advantage"] = torch.randn(*part["next", "reward"].shape)
        part["ref_log_probs"] = torch.randn(part["tokens", "full"].shape)
        part["hidden"] = torch.randn(*part["tokens", "response"].shape, 2)
    joined = concat(parts)
    assert torch.equal(joined["advantage"], torch.cat([part["advantage"] for part in parts]))
    for batch in (joined, concat(minibatches(joined, 4))):
        rows = [(part, row) for part in parts for row in range(len(part["seed"]))]
        for (part, row), full, response in zip(rows, places(batch).full, places(batch).response, strict=True):
            assert torch.equal(batch["ref_log_probs"][full], part["ref_log_probs"][places(part).full[row]])
            assert torch.equal(batch["hidden"][response], part["hidden"][places(part).response[row]])


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda make: [], r"batches=\[\] is not allowed: must be at least one"),
        (lambda make: [make(), make(layout="packed")], r"layouts of the batches=\['padded', 'packed'\] is not allowed"),
        (lambda make: [make(), {"tokens": 1}], r"batches\[1\]=\{'tokens': 1\} is not allowed: must be a TensorDict"),
        (lambda make: [make(), make(rewards=False)], r"batches\[1\]\[\('next', 'reward'\)\]=None.*as in batches\[0\]"),
        (lambda make: [make(columns=False), make()], r"batches\[0\]\['answer'\]=None.*batch\.exclude\('answer'\)"),
        (lambda make: [make(num_samples=1, num_groups=4).reshape(2, 2)], r"batches\[0\]\.batch_size=\[2, 2\]"),
        (lambda make: [make()[0]], r"batches\[0\]\.batch_size=\[\] is not allowed.*batch\[i : i \+ 1\]"),
        (lambda make: [make().exclude("tokens")], r"batches\[0\]\.keys\(\)=.*must be with \['tokens'\]"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_its_place(make_batch, make, message):
    with pytest.raises(RequestError, match=message):
        concat(make(make_batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_that_follows_no_tokens_is_refused_by_its_name(make_batch, layout):
    parts = [make_batch(seed, layout) for seed in range(2)]
    for i, part in enumerate(parts):
        part["odd"] = torch.zeros(*part.batch_size, 50 + i, 3)
    with pytest.raises(RequestError, match="odd"):
        concat(parts)
    with pytest.raises(RequestError, match="group_ids='anew' is not allowed: must be 'renumber' or 'keep'"):
        concat([make_batch(layout=layout)], group_ids="anew")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_minibatches_hold_each_sequence_once_in_order(make_batch, layout, size):
    batch = make_batch(5, layout, num_groups=4)
    parts = list(minibatches(batch, size))
    num = len(batch["seed"])
    assert [len(part["seed"]) for part in parts] == [size] * (num // size) + [num % size] * (num % size > 0)
    assert [each for part in parts for each in sequences(part, "group_id")] == sequences(batch, "group_id")
    assert all(type(part) is RolloutBatch for part in parts)
    if layout == "packed":
        assert all(part["cu_seqlens"].dtype == torch.int32 for part in parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_generator_decides_the_order(make_batch, layout):
    batch = make_batch(6, layout, num_groups=5)
    order = torch.randperm(len(batch["seed"]), generator=torch.Generator().manual_seed(1)).tolist()
    everything = sequences(batch)

    def shuffled(**options):
        return [each for part in minibatches(batch, 3, **options) for each in sequences(part)]

    assert shuffled(generator=torch.Generator().manual_seed(1)) == [everything[i] for i in order]
    torch.manual_seed(1)
    assert shuffled(shuffle=True) == [everything[i] for i in order] != everything


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_whole_groups_stay_together(make_batch, layout, shuffle):
    batch = make_batch(7, layout, num_groups=9)
    parts = list(minibatches(batch, 5, shuffle=shuffle, keep_groups=True))
    groups = [set(part["group_id"].tolist()) for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 9
    assert all(len(part["seed"]) <= 5 for part in parts) and sum(len(part["seed"]) for part in parts) == len(
        batch["seed"]
    )


@pytest.mark.parametrize(
    "size,options,message",
    [
        (0, {}, "size=0 is not allowed: must be an int of at least 1"),
        (2.0, {}, "size=2.0 is not allowed"),
        (1, {"keep_groups": True}, "size=1 is not allowed: must be at least 2, the sequences of the largest group"),
    ],
)
def test_a_size_that_cannot_be_is_refused_at_the_call(make_batch, size, options, message):
    with pytest.raises(RequestError, match=message):
        minibatches(make_batch(num_samples=2), size, **options)


def test_slices_of_a_rollout_still_know_their_prompts(make_batch):
    batch = make_batch(8, num_groups=4)
    assert sequences(batch[2:5]) == sequences(batch)[2:5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_and_wholes_keep_the_note_on_their_tokens(make_batch, layout):
    one, other, unknown = (make_batch(layout=layout) for _ in range(3))
    note = RolloutNote("float32", 1.0, layout == "packed", adapters=frozenset(["a"]))
    rounded = note._replace(temperature=0.5, quantization="int8", adapters=frozenset([None]))
    attach(one["tokens", "full"], note)
    attach(other["tokens", "full"], rounded)

    def noted(batch):
        return rollout_note(batch["tokens", "full"])

    parts = [
        one.clone(),
        one.to("meta"),
        *minibatches(one, 2),
        concat([one, one]),
        *([one[1:], one[[0]], *one.split(2)] if layout == "padded" else []),
    ]
    assert all(noted(part) == note for part in parts)
    assert noted(concat([one, other])) == rounded._replace(temperature=None, adapters=frozenset(["a", None]))
    assert noted(concat([one, unknown])) is None and noted(unknown.clone()) is None
