"""With `partial=True` an update sends some weights, and every other keeps its values."""

import os

import pytest
import torch

import sync
from rollout_engine.base import errors
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.model.cpu import shadow_memory
from rollout_engine.weights.update import apply_update

SUBSETS = [["q"], ["k", "steps"], ["embed"], ["head"], ["qk"], ["embed", "q", "k", "steps"]]


def some(weights, names):
    whole = weights()
    whole |= {"head": whole["embed"], "qk": torch.cat([whole["q"], whole["k"]])}
    return {name: whole[name] for name in names}


def fail(*_):
    raise MemoryError


def values(engine):
    return {name: tensor.clone() for name, tensor in engine.live.items()}


def expected(before, sent):
    """The live values after `sent` has come over `before`."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    after |= sent
    after["embed"] = after["head"] = sent.get("embed", sent.get("head", before["embed"]))
    if "qk" not in sent:
        after["qk"] = torch.cat([after["q"], after["k"]])
    after["q"], after["k"] = after["qk"][:4], after["qk"][4:]
    return after


@pytest.mark.parametrize("staging", ["shadow", "inplace"])
@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_what_is_sent_becomes_live_and_the_rest_stays(engine, weights, names, staging):
    wanted = expected(values(engine), some(weights, names))
    report = engine.update(some(weights, names), partial=True, staging=staging)
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in wanted.items())
    assert (report.version, report.num_tensors, engine.updater.version) == (1, len(names), 1)
    assert report.digest == engine.updater.digest()


def test_the_digest_is_of_all_weights(weights, make_engine):
    engine, other = make_engine(), make_engine()
    engine.update(weights())
    other.update({name: weights()[name] for name in ("q", "steps")}, partial=True)
    report = other.update({name: weights()[name] for name in ("k", "embed")}, partial=True)
    assert report.digest == other.updater.digest() == engine.updater.digest()


@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_whole_and_partial_updates_take_turns(engine, weights, staging):
    for seed in (30, 40, 50):
        engine.update(weights(seed))
        wanted = expected(
            weights(seed) | {"qk": torch.cat([weights(seed)["q"], weights(seed)["k"]])}, some(weights, "q")
        )
        engine.update(some(weights, "q"), partial=True, staging=staging)
        assert all(torch.equal(engine.live[name], wanted[name]) for name in engine.live)


def test_without_the_flag_a_missing_weight_is_refused_and_the_flag_named(engine, weights):
    before = engine.state()
    advice = "Send every weight, or only some with partial=True, which leaves the others as they are"
    with pytest.raises(errors.ManifestMismatchError, match=f"1 tensor is missing: q. {advice}"):
        engine.update(weights(q=None))
    assert engine.state() == before


@pytest.mark.parametrize(
    "source,message",
    [
        ({}, "partial=True, and the update has no tensor"),
        ({"p": torch.ones(4, 4)}, "1 name is not in the model: p"),
        ({"q": torch.ones(4, 5)}, r"'q': expected .*\(4, 4\).*came .*\(4, 5\)"),
        ({"qk": torch.ones(6, 4), "k": torch.ones(2, 4)}, "1 name overlaps others of the manifest: k"),
        ({"embed": torch.ones(5, 4), "head": torch.zeros(5, 4)}, "are tied in the engine, but differ"),
    ],
)
def test_what_is_sent_is_checked_as_ever(engine, source, message):
    before = engine.state()
    with pytest.raises(errors.ManifestMismatchError, match=message):
        engine.update(source, partial=True)
    assert engine.state() == before


def test_a_partial_update_that_fails_changes_nothing(engine, weights):
    before, live = engine.state(), values(engine)
    with pytest.raises(errors.ChecksumError, match="'k' has values that are NaN"):
        engine.update({"q": weights()["q"], "k": torch.full((2, 4), float("nan"))}, partial=True)
    assert engine.state() == before and all(torch.equal(engine.live[name], live[name]) for name in live)


def test_a_first_write_that_fails_is_prepared_again_by_the_next(engine, weights, offer, monkeypatch):
    before = values(engine)
    manifest, sender = offer(engine, some(weights, ["q"]))
    engine.updater.begin(manifest, UpdateOptions(partial=True))
    with monkeypatch.context() as patch:
        patch.setattr(shadow_memory, "UntypedStorage", fail)
        with pytest.raises(MemoryError):
            engine.updater.stage([("q", sender.read("q"))])
    engine.updater.stage([("q", sender.read("q"))])
    engine.updater.verify()
    engine.updater.commit()
    assert all(torch.equal(engine.live[name], before[name]) for name in ("k", "embed", "steps"))
    assert torch.equal(engine.live["q"], sender.read("q"))


def test_incomplete_weights_need_a_whole_update(engine, weights):
    with pytest.raises(errors.DirtyWeightsError, match="Live weights are a mixture"):
        engine.update({"q": torch.full((4, 4), float("nan"))}, partial=True, staging="inplace")
    with pytest.raises(
        errors.DirtyWeightsError, match=r"update_weights\(partial=True\): .* incomplete: .*complete update"
    ):
        engine.update(some(weights, ["q"]), partial=True)
    assert engine.update(weights()).version == 1 and not engine.updater.dirty


def test_the_same_again_under_the_same_version_is_a_no_op(engine, weights):
    first = engine.update(some(weights, ["q"]), partial=True, version=3)
    again = engine.update(some(weights, ["q"]), partial=True, version=3)
    assert (again.digest, again.num_tensors, engine.num_commits) == (first.digest, 0, 1)
    with pytest.raises(errors.StaleVersionError):
        engine.update({"q": torch.zeros(4, 4)}, partial=True, version=3)


@pytest.mark.parametrize("transport", ["store", "shm"])
def test_a_part_travels_by_other_transports_too(engine, weights, steps, tmp_path, transport):
    wanted = expected(values(engine), some(weights, ["k"]))
    directory = tmp_path / "meeting"
    sender = sync.make_sender(transport, directory=directory)
    manifest = sender.offer(some(weights, ["k"]), 1, engine.updater.metadata())
    receiver = sync.make_receiver(transport, directory=directory, num_threads=2)
    report = apply_update(engine.updater, manifest, receiver, steps, UpdateOptions.from_values(partial=True))
    sender.close()
    assert report.digest == engine.updater.digest()
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in wanted.items())


def test_a_published_part_is_taken_from_its_path(engine, weights, tmp_path):
    wanted = expected(values(engine), some(weights, ["embed"]))
    sync.publish(tmp_path, some(weights, ["embed"]), 4)
    with pytest.raises(errors.ManifestMismatchError, match="partial=True"):
        engine.update(tmp_path)
    assert engine.update(os.fspath(tmp_path), partial=True).version == 4
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in wanted.items())


def test_the_flag_is_a_bool(engine, weights):
    with pytest.raises(errors.WeightUpdateError, match="partial='q' is not allowed: must be True or False"):
        engine.update(weights(), partial="q")
