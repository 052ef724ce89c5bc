"""A weight update happens wholly or not at all."""

import os
import random
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rollout_engine.base import errors
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.testing import tiny_model
from rollout_engine.weights.update import apply_update, update_from_source
from sync.base import WeightReceiver
from sync.cast_notice import CastNotice
from sync.errors import ChecksumMismatch


def test_a_commit_makes_every_tensor_live(engine, weights):
    source = weights()
    report = engine.update(source)
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in source.items())
    assert torch.equal(engine.live["head"], source["embed"])
    assert torch.equal(engine.live["qk"], torch.cat([source["q"], source["k"]]))
    assert (report.version, report.num_tensors, report.num_in_flight) == (1, 4, 5)
    assert report.num_bytes == 4 * (20 + 16 + 8) + 8
    assert 0 < report.stall_seconds <= report.seconds
    assert (engine.updater.version, engine.num_commits, engine.updater.dirty) == (1, 1, False)


def test_live_storage_never_moves(engine, weights):
    places = {name: view.data_ptr() for name, view in engine.live.items()}
    engine.update(weights())
    assert places == {name: view.data_ptr() for name, view in engine.live.items()}


def test_both_namings_give_the_same_live_weights(engine, weights, make_engine):
    parts = weights()
    whole = {"qk": torch.cat([parts.pop("q"), parts.pop("k")])} | parts
    other = make_engine()
    engine.update(weights())
    report = other.update(whole)
    assert engine.updater.digest() == other.updater.digest() == report.digest


def test_float32_masters_feed_a_bfloat16_engine(weights, make_engine):
    engine, masters = make_engine(torch.bfloat16), weights()
    engine.update(masters)
    assert torch.equal(engine.live["q"], masters["q"].to(torch.bfloat16))


def test_a_trainer_of_another_dtype_is_remarked_upon_once_for_each_engine_and_dtype(weights, make_engine, caplog):
    engines = make_engine(torch.bfloat16), make_engine(torch.bfloat16)
    for engine in (*engines, *engines):
        engine.update(weights())
    said = "The trainer is float32, the engine bfloat16: weights are cast on the way, and ratios are exact only against"
    assert [record.name for record in caplog.records] == ["rollout_engine"] * 2
    assert all(record.getMessage().startswith(said) for record in caplog.records)
    for _ in range(2):
        engines[0].update(weights(dtype=torch.float64))
    assert len(caplog.records) == 3 and "The trainer is float64" in caplog.text


def test_tensors_that_the_model_keeps_in_float32_do_not_make_it_a_float32_engine(caplog):
    notice, metadata = CastNotice(), {"q": ("bfloat16", (8, 8)), "bias": ("float32", (8,))}
    whole = [("q", torch.zeros(8, 8, dtype=torch.bfloat16)), ("bias", torch.zeros(8, dtype=torch.bfloat16))]
    for pairs in (whole, whole, [whole[0], ("bias", torch.zeros(8))]):
        notice.warn_if_cast(pairs, metadata)
    [said] = [record.getMessage() for record in caplog.records]
    assert "keeps 1 tensor in float32, such as 'bias', and they arrive in bfloat16" in said
    notice.warn_if_cast([(name, tensor.float()) for name, tensor in whole], metadata)
    assert "The trainer is float32, the engine bfloat16" in caplog.text


def test_a_trainer_of_the_engines_dtype_is_not_remarked_upon(weights, make_engine, caplog):
    make_engine(torch.bfloat16).update(weights(dtype=torch.bfloat16))
    make_engine().update(weights())
    assert not caplog.records


@pytest.mark.parametrize(
    "dtype,advice",
    [
        ("bfloat16", r"or make the engine with dtype='bfloat16'\.$"),
        ("float64", r"Train in float32\.$"),
        ("float16", r"Train in float32\.$"),
    ],
)
def test_only_a_dtype_that_engines_have_is_advised(weights, make_engine, caplog, dtype, advice):
    make_engine().update(weights(dtype=getattr(torch, dtype)))
    assert re.search(advice, caplog.records[0].getMessage())


def test_the_digest_is_of_what_is_live(engine, weights, offer):
    report = engine.update(weights())
    assert report.digest == offer(engine, weights())[0].digest
    before = engine.updater.digest()
    engine.live["k"][0, 0] += 1
    assert engine.updater.digest() != before


@pytest.mark.parametrize(
    "changes,error,message",
    [
        (dict(q=None), errors.ManifestMismatchError, "1 tensor is missing: q"),
        (dict(extra=torch.ones(1)), errors.ManifestMismatchError, r"model: extra\. Send .*, whose names are such"),
        (dict(q=torch.ones(4, 5)), errors.ManifestMismatchError, r"'q': expected .*\(4, 4\).*came .*\(4, 5\)"),
        (
            dict(q=torch.ones(4, 4, dtype=torch.int64)),
            errors.ManifestMismatchError,
            "'q': expected .*float32.*int64",
        ),
        (dict(steps=torch.tensor(1.0)), errors.ManifestMismatchError, "'steps': expected .*int64.*float32"),
        (dict(qk=torch.ones(6, 4)), errors.ManifestMismatchError, "names overlap others of the manifest: q, k"),
        (dict(head=torch.ones(5, 4)), errors.ManifestMismatchError, "'embed' and 'head' are tied in the engine"),
        (dict(k=torch.tensor([[float("nan")] * 4, [0.0] * 4])), errors.ChecksumError, "'k' has values that are NaN"),
        (dict(k=torch.tensor([[0.0] * 4, [-float("inf")] * 4])), errors.ChecksumError, "'k' has values that are"),
        (
            dict.fromkeys(("embed", "q", "k", "steps")),
            errors.ManifestMismatchError,
            "3 tensors are missing: embed, qk",
        ),
    ],
)
def test_a_refused_update_names_the_reason_and_changes_nothing(engine, changes, error, message, weights):
    before = engine.state()
    with pytest.raises(error, match=message):
        engine.update(weights(**changes))
    assert engine.state() == before
    assert engine.update(weights()).version == 1


def test_a_path_that_holds_no_weights_is_refused(engine, tmp_path):
    before = engine.state()
    with pytest.raises(errors.ManifestMismatchError, match="/no/such/kind does not exist: give the path of"):
        engine.update("no/such/kind")
    with pytest.raises(errors.ManifestMismatchError, match="is not a published store"):
        engine.update(tmp_path)
    assert engine.state() == before


def test_a_checkpoint_that_is_rewritten_while_it_is_read_changes_nothing(engine, weights, tmp_path, monkeypatch):
    save_file(weights(), tmp_path / "model.safetensors")
    real, reads = os.preadv, []

    def read_and_rewrite(*arguments):
        count = real(*arguments)
        reads.append(count)
        if len(reads) == 4:
            save_file(weights(seed=20), tmp_path / "model.safetensors")
        return count

    before = engine.state()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read_and_rewrite)
        with pytest.raises(errors.ChecksumError, match=r"model\.safetensors .* while it was read"):
            engine.update(str(tmp_path))
    assert engine.state() == before
    engine.update(str(tmp_path))
    assert torch.equal(engine.live["q"], weights(seed=20)["q"])


def test_a_value_too_large_for_the_engines_dtype_is_refused(weights, make_engine):
    engine = make_engine(torch.bfloat16)
    with pytest.raises(errors.ChecksumError, match="'q' has values that are NaN or infinite"):
        engine.update(weights(q=torch.full((4, 4), 3.4e38)))


def test_a_tie_that_only_the_source_has_is_refused(engine, steps, make_updater):
    square = torch.randn(4, 4)
    live = {"a": square, "b": square.clone()}
    updater = make_updater(live)
    with pytest.raises(errors.ManifestMismatchError, match="b: tied to 'a' at the source, but not in the engine"):
        update_from_source(updater, {"a": square, "b": square}, steps, UpdateOptions())


def test_a_tied_tensor_may_be_sent_under_both_names(engine, weights):
    source = weights()
    engine.update(source | {"head": source["embed"].clone()})
    assert torch.equal(engine.live["head"], source["embed"])
    shared = weights(seed=20)
    engine.update(shared | {"head": shared["embed"]})
    assert torch.equal(engine.live["embed"], shared["embed"])


def test_a_tied_tensor_may_be_sent_under_its_second_name(engine, weights):
    source = weights()
    engine.update({"head": source.pop("embed")} | source)
    assert engine.updater.version == 1


def test_versions_only_move_forward(engine, weights):
    engine.update(weights(), version=5)
    for version in (4, 5, 0):
        with pytest.raises(errors.StaleVersionError, match=f"Version {version} .*reset_version=True"):
            engine.update(weights(seed=30), version=version)
    assert torch.equal(engine.live["q"], weights()["q"])
    assert engine.update(weights(seed=30)).version == 6


def test_the_same_weights_under_the_same_version_are_a_no_op(engine, weights):
    first = engine.update(weights(), version=3)
    again = engine.update(weights(), version=3)
    assert (again.version, again.digest, again.num_tensors, again.num_bytes) == (3, first.digest, 0, 0)
    assert engine.num_commits == 1


def test_a_trainer_that_restarted_may_reset_the_version(engine, weights):
    engine.update(weights(), version=9)
    assert engine.update(weights(seed=30), version=2, reset_version=True).version == 2
    assert engine.updater.version == 2


def test_a_commit_that_fails_leaves_the_weights_dirty_until_a_complete_update(engine, weights):
    def fail():
        raise MemoryError("no room")

    engine.packed.at_swap = fail
    with pytest.raises(errors.DirtyWeightsError, match="commit of version 1 failed: no room"):
        engine.update(weights())
    assert engine.updater.dirty and engine.updater.version == 0
    del engine.packed.at_swap
    engine.update(weights())
    assert not engine.updater.dirty and engine.updater.version == 1


def test_a_commit_that_does_not_reach_live_storage_is_not_believed(engine, weights):
    def overwrite():
        engine.live["q"].zero_()

    engine.packed.at_swap = overwrite
    with pytest.raises(errors.DirtyWeightsError, match="not the ones that were staged"):
        engine.update(weights())
    assert engine.updater.dirty


def test_acceptance_is_announced_before_a_tensor_is_asked_for_and_not_for_a_refused_manifest(
    engine, weights, offer, steps
):
    manifest, sender = offer(engine, weights())
    order = []

    class Receiver(WeightReceiver):
        def receive(self, manifest):
            order.append("asked")
            yield from ((spec.name, sender.read(spec.name)) for spec in manifest.tensors)

    def apply():
        options = UpdateOptions(staging="shadow")
        apply_update(engine.updater, manifest, Receiver(), steps, options, accepted=lambda: order.append("accepted"))

    apply()
    assert order == ["accepted", "asked"]
    apply()  # live already
    engine.update(weights(seed=30))
    with pytest.raises(errors.StaleVersionError):
        apply()
    assert order == ["accepted", "asked"]


def test_commit_and_version_change_happen_inside_the_boundary_and_what_is_live_is_read_after_it(
    engine, weights, steps, monkeypatch
):
    engine.packed.at_swap = lambda: steps.trace.append("swap")
    confirm = engine.updater.confirm
    monkeypatch.setattr(engine.updater, "confirm", lambda: steps.trace.append("confirm") or confirm())
    engine.update(weights(), steps=steps, mode="wait")
    assert steps.trace == ["drain wait", "enter", "swap", 1, "leave", "confirm"]


def test_an_update_in_place_stops_steps_before_its_first_byte_and_holds_no_shadow(engine, weights, steps):
    engine.update(weights())
    steps.stop = lambda: steps.trace.append(("stop", engine.updater.dirty, float(engine.live["q"][0, 0])))
    before = float(engine.live["q"][0, 0])
    report = engine.update(weights(seed=30), steps=steps, staging="inplace", mode="abort")
    assert steps.trace == ["drain abort", "enter", ("stop", False, before), "leave", "enter", 2, "leave"]
    assert (report.staging, report.num_shadow_bytes, engine.updater.dirty) == ("inplace", 0, False)
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in weights(seed=30).items())


def test_an_update_in_place_that_fails_leaves_the_weights_dirty_until_a_complete_one(engine, weights):
    engine.update(weights())
    nan = torch.full((2, 4), float("nan"))
    with pytest.raises(
        errors.DirtyWeightsError, match="version 2 in place failed: 'k' has values that are NaN"
    ) as raised:
        engine.update(weights(seed=30, k=nan), staging="inplace")
    assert isinstance(raised.value.__cause__, ChecksumMismatch)
    assert engine.updater.dirty and engine.updater.version == 1
    with pytest.raises(errors.ChecksumError, match="'k' has values that are NaN"):
        engine.update(weights(seed=30, k=nan))
    assert engine.updater.dirty
    assert engine.update(weights(seed=30)).staging == "inplace"  # there is nothing to protect
    assert not engine.updater.dirty and engine.updater.version == 2


def test_an_update_in_place_that_is_refused_before_its_first_byte_changes_nothing(engine, weights):
    engine.update(weights())
    before = engine.state()
    with pytest.raises(errors.ManifestMismatchError):
        engine.update(weights(q=None), staging="inplace")
    with pytest.raises(errors.StaleVersionError):
        engine.update(weights(seed=30), version=0, staging="inplace")
    assert engine.state() == before


def test_an_update_is_in_place_where_no_shadow_fits(engine, monkeypatch, weights):
    assert engine.updater.num_bytes_to_shadow() == 4 * (20 + 24) + 8
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    assert engine.update(weights()).staging == "inplace"
    monkeypatch.undo()
    report = engine.update(weights(seed=30))
    assert (report.staging, report.num_shadow_bytes) == ("shadow", 4 * (20 + 24) + 8)
    assert engine.updater.num_bytes_to_shadow() == 0


def test_values_that_are_not_finite_are_taken_where_that_is_allowed(engine, weights):
    infinite = torch.tensor([[float("inf"), float("nan"), 0.0, 1.0]] * 2)
    engine.update(weights(k=infinite), allow_nonfinite=True)
    assert torch.equal(engine.live["k"].isfinite(), infinite.isfinite())
    with pytest.raises(errors.ChecksumError, match="NaN or infinite"):
        engine.update(weights(k=infinite), version=2)


def test_weights_that_come_after_the_deadline_are_refused(engine, weights):
    before = engine.state()
    with pytest.raises(errors.TransferTimeoutError, match="'embed' came after the deadline"):
        engine.update(weights(), timeout=1e-9)
    assert engine.state() == before


@pytest.mark.parametrize(
    "option,message",
    [
        ({"mode": "later"}, "mode='later' is not allowed: must be one of 'keep', 'wait', 'abort'"),
        ({"kv": "flush"}, "kv='flush' is not allowed"),
        ({"staging": "disk"}, "staging='disk' is not allowed"),
        ({"timeout": 0}, "timeout=0 is not allowed"),
        ({"timeout": float("nan")}, "timeout=nan is not allowed"),
        ({"timeout": "1"}, "timeout='1' is not allowed: must be seconds"),
        ({"reset_version": 1}, "reset_version=1 is not allowed: must be True or False"),
    ],
)
def test_an_option_that_is_not_allowed_is_refused_by_name(engine, option, message, weights):
    with pytest.raises(errors.WeightUpdateError, match=message):
        engine.update(weights(), **option)


def test_the_shadow_is_used_again(engine, weights):
    engine.update(weights())
    shadows = [tensor.data_ptr() for tensor in engine.updater.weights.copies()]
    engine.update(weights(seed=30))
    assert shadows == [tensor.data_ptr() for tensor in engine.updater.weights.copies()] and len(shadows) == 3


FAULTS = {
    "missing": lambda tensors, name: tensors.pop(name),
    "renamed": lambda tensors, name: tensors.update({name + "_": tensors.pop(name)}),
    "reshaped": lambda tensors, name: tensors.update({name: tensors[name].unsqueeze(0)}),
    "wrong kind": lambda tensors, name: tensors.update({name: tensors[name] > 0}),
    "no tensor": lambda tensors, name: tensors.update({name: None}),
    "twice": lambda tensors, name: tensors.update({"qk": torch.zeros(6, 4)}),
    "nan": lambda tensors, name: tensors["q"].view(-1)[7:8].fill_(float("nan")),
    "infinite": lambda tensors, name: tensors["k"].view(-1)[3:4].fill_(-float("inf")),
}


def test_no_fault_of_many_gets_through_and_good_updates_do(engine, weights, steps):
    rng = random.Random(0)
    for i in range(200):
        before, fault, source = engine.state(), rng.choice([*FAULTS, None]), weights(seed=i)
        if fault is None:
            assert engine.update(source).version == before[1] + 1
            assert all(torch.equal(engine.live[name], tensor) for name, tensor in source.items())
            continue
        FAULTS[fault](source, rng.choice(["embed", "q", "k", "steps"]))
        with pytest.raises(errors.WeightUpdateError):
            engine.update(source)
        assert engine.state() == before, fault


@pytest.mark.parametrize("tie", [False, True])
def test_a_hugging_face_model_updates_from_another_one(tie, steps, make_updater):
    live, trainer = (tiny_model(seed=seed, tie_word_embeddings=tie) for seed in (0, 1))
    table = live.state_dict()
    aliases = [["model.embed_tokens.weight", "lm_head.weight"]] if tie else []
    updater = make_updater(table, aliases)
    before = updater.digest()
    update_from_source(updater, nn.Module.train(trainer), steps, UpdateOptions())
    assert updater.digest() != before
    assert all(torch.equal(tensor, table[name]) for name, tensor in trainer.state_dict().items())
