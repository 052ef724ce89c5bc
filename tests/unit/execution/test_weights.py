"""A weight update happens wholly or not at all."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from rollout_engine import errors
from rollout_engine.errors import LifecycleError
from rollout_engine.execution import weight_update
from rollout_engine.execution.weight_update import UpdateOptions, update_from_source
from rollout_engine.execution.weights import WeightUpdater
from rollout_engine.model.packed_weights import PackedWeights
from rollout_engine.testing import tiny_model
from sync.errors import ChecksumMismatch, ManifestMismatch, StaleVersion
from sync.inproc import InprocSender


class Packed(PackedWeights):
    """Of a model without linears; `at_swap` is called within the commit."""

    num_swaps = -1  # one at the start makes it 0
    at_swap = staticmethod(lambda: None)

    def __init__(self):
        super().__init__(nn.Module())

    def swap(self):
        self.num_swaps += 1
        self.at_swap()


class Steps:
    """Nothing steps; `trace` tells what was asked."""

    def __init__(self, num_in_flight=5):
        self.num_in_flight, self.trace = num_in_flight, []

    @contextmanager
    def boundary(self):
        self.trace.append("enter")
        yield
        self.trace.append("leave")

    def settle(self, mode, deadline):
        self.trace.append(f"settle {mode}")

    def stop(self):
        self.trace.append("stop")

    def advance(self, version):
        self.trace.append(version)
        return self.num_in_flight


class Engine:
    """Live storage as an engine keeps it: q and k as views of one buffer, a tied head, an integer buffer."""

    def __init__(self, dtype=torch.float32, seed=0):
        fused = random_tensor((6, 4), seed, dtype)
        embed = random_tensor((5, 4), seed + 1, dtype)
        self.live = {
            "embed": embed,
            "head": embed,
            "qk": fused,
            "q": fused[:4],
            "k": fused[4:],
            "steps": torch.tensor(3),
        }
        self.packed = Packed()
        self.updater = WeightUpdater(self.live, [["embed", "head"]], self.packed)

    @property
    def num_commits(self):
        return self.packed.num_swaps

    def update(self, source, version=None, steps=None, **options):
        return update_from_source(self.updater, source, steps or Steps(), UpdateOptions.checked(**options), version)

    def state(self):
        return self.updater.digest(), self.updater.version, self.num_commits, self.updater.dirty


def random_tensor(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(seed=10, dtype=torch.float32, **changes):
    """A complete update under the part names; `changes` replace tensors, None removes one."""
    parts = {
        "embed": random_tensor((5, 4), seed, dtype),
        "q": random_tensor((4, 4), seed + 1, dtype),
        "k": random_tensor((2, 4), seed + 2, dtype),
        "steps": torch.tensor(seed),
    }
    return {name: tensor for name, tensor in (parts | changes).items() if tensor is not None}


def offer(engine, source, version=1):
    sender = InprocSender()
    manifest = sender.offer(source, version, engine.updater.metadata())
    return manifest, sender


@pytest.fixture
def engine():
    return Engine()


def test_a_commit_makes_every_tensor_live(engine):
    source = weights()
    report = engine.update(source)
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in source.items())
    assert torch.equal(engine.live["head"], source["embed"])
    assert torch.equal(engine.live["qk"], torch.cat([source["q"], source["k"]]))
    assert (report.version, report.num_tensors, report.num_in_flight) == (1, 4, 5)
    assert report.num_bytes == 4 * (20 + 16 + 8) + 8
    assert 0 < report.stall_seconds <= report.seconds
    assert (engine.updater.version, engine.num_commits, engine.updater.dirty) == (1, 1, False)


def test_live_storage_never_moves(engine):
    places = {name: view.data_ptr() for name, view in engine.live.items()}
    engine.update(weights())
    assert places == {name: view.data_ptr() for name, view in engine.live.items()}


def test_both_namings_give_the_same_live_weights(engine):
    parts = weights()
    whole = {"qk": torch.cat([parts.pop("q"), parts.pop("k")])} | parts
    other = Engine()
    engine.update(weights())
    report = other.update(whole)
    assert engine.updater.digest() == other.updater.digest() == report.digest


def test_float32_masters_feed_a_bfloat16_engine():
    engine, masters = Engine(torch.bfloat16), weights()
    engine.update(masters)
    assert torch.equal(engine.live["q"], masters["q"].to(torch.bfloat16))


def test_the_digest_is_of_what_is_live(engine):
    report = engine.update(weights())
    assert report.digest == offer(engine, weights())[0].digest
    before = engine.updater.digest()
    engine.live["k"][0, 0] += 1
    assert engine.updater.digest() != before


@pytest.mark.parametrize(
    "source,error,message",
    [
        (weights(q=None), errors.ManifestMismatchError, "1 tensors are missing: q"),
        (weights(extra=torch.ones(1)), errors.ManifestMismatchError, "1 names are not in the model: extra"),
        (weights(q=torch.ones(4, 5)), errors.ManifestMismatchError, r"'q': expected .*\(4, 4\).*came .*\(4, 5\)"),
        (
            weights(q=torch.ones(4, 4, dtype=torch.int64)),
            errors.ManifestMismatchError,
            "'q': expected .*float32.*int64",
        ),
        (weights(steps=torch.tensor(1.0)), errors.ManifestMismatchError, "'steps': expected .*int64.*float32"),
        (weights(qk=torch.ones(6, 4)), errors.ManifestMismatchError, "names overlap others of the manifest: q, k"),
        (weights(head=torch.ones(5, 4)), errors.ManifestMismatchError, "'embed' and 'head' are tied in the engine"),
        (weights(k=torch.tensor([[float("nan")] * 4, [0.0] * 4])), errors.ChecksumError, "'k' has values that are NaN"),
        (weights(k=torch.tensor([[0.0] * 4, [-float("inf")] * 4])), errors.ChecksumError, "'k' has values that are"),
        ({}, errors.ManifestMismatchError, "3 tensors are missing: embed, qk, steps"),
        ("no/such/kind", errors.ManifestMismatchError, "not a published store"),
    ],
)
def test_a_refused_update_names_the_reason_and_changes_nothing(engine, source, error, message):
    before = engine.state()
    with pytest.raises(error, match=message):
        engine.update(source)
    assert engine.state() == before
    assert engine.update(weights()).version == 1


def test_a_value_too_large_for_the_engines_dtype_is_refused():
    engine = Engine(torch.bfloat16)
    with pytest.raises(errors.ChecksumError, match="'q' has values that are NaN or infinite"):
        engine.update(weights(q=torch.full((4, 4), 3.4e38)))


def test_a_tie_that_only_the_source_has_is_refused(engine):
    square = random_tensor((4, 4), 1)
    live = {"a": square, "b": square.clone()}
    updater = WeightUpdater(live, [], Packed())
    with pytest.raises(errors.ManifestMismatchError, match="b: tied to 'a' at the source, but not in the engine"):
        update_from_source(updater, {"a": square, "b": square}, Steps(), UpdateOptions())


def test_a_tied_tensor_may_be_sent_under_both_names(engine):
    source = weights()
    engine.update(source | {"head": source["embed"].clone()})
    assert torch.equal(engine.live["head"], source["embed"])
    shared = weights(seed=20)
    engine.update(shared | {"head": shared["embed"]})
    assert torch.equal(engine.live["embed"], shared["embed"])


def test_a_tied_tensor_may_be_sent_under_its_second_name(engine):
    source = weights()
    engine.update({"head": source.pop("embed")} | source)
    assert engine.updater.version == 1


def test_versions_only_move_forward(engine):
    engine.update(weights(), version=5)
    for version in (4, 5, 0):
        with pytest.raises(errors.StaleVersionError, match=f"Version {version} .*reset_version=True"):
            engine.update(weights(seed=30), version=version)
    assert torch.equal(engine.live["q"], weights()["q"])
    assert engine.update(weights(seed=30)).version == 6


def test_the_same_weights_under_the_same_version_are_a_no_op(engine):
    first = engine.update(weights(), version=3)
    again = engine.update(weights(), version=3)
    assert (again.version, again.digest, again.num_tensors, again.num_bytes) == (3, first.digest, 0, 0)
    assert engine.num_commits == 1


def test_a_trainer_that_restarted_may_reset_the_version(engine):
    engine.update(weights(), version=9)
    assert engine.update(weights(seed=30), version=2, reset_version=True).version == 2
    assert engine.updater.version == 2


def test_an_update_can_be_aborted_at_any_point(engine):
    before = engine.state()
    manifest, sender = offer(engine, weights())
    for num_staged in range(5):
        assert engine.updater.begin(manifest)
        for spec in manifest.tensors[:num_staged]:
            engine.updater.stage([(spec.name, sender.read(spec.name))])
        engine.updater.abort()
        assert engine.state() == before
    engine.updater.abort()


def test_an_incomplete_update_cannot_be_verified(engine):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    for name in ("embed", "q"):
        engine.updater.stage([(name, sender.read(name))])
    with pytest.raises(ChecksumMismatch, match="2 tensors of the manifest never arrived: k, steps"):
        engine.updater.verify()


def test_tensors_of_an_earlier_update_do_not_count_as_arrived(engine):
    engine.update(weights())
    engine.updater.begin(offer(engine, weights(seed=30), version=2)[0])
    with pytest.raises(ChecksumMismatch, match="4 tensors of the manifest never arrived"):
        engine.updater.verify()


def test_one_flipped_bit_on_the_way_is_found(engine):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    for spec in manifest.tensors:
        tensor = sender.read(spec.name).clone()
        if spec.name == "k":
            tensor.view(torch.int32)[1, 3] ^= 1 << 7
        engine.updater.stage([(spec.name, tensor)])
    with pytest.raises(ChecksumMismatch, match="'k' changed on the way"):
        engine.updater.verify()


def test_what_is_staged_after_verify_must_be_verified_again(engine):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    for spec in manifest.tensors:
        engine.updater.stage([(spec.name, sender.read(spec.name))])
    engine.updater.verify()
    engine.updater.stage([("k", torch.zeros(2, 4))])
    with pytest.raises(LifecycleError, match="commit: the open update is not verified"):
        engine.updater.commit()


@pytest.mark.parametrize(
    "name,tensor", [("nope", torch.ones(1)), ("q", torch.ones(2, 4)), ("q", torch.ones(4, 4).half())]
)
def test_a_tensor_that_the_manifest_did_not_announce_is_refused(engine, name, tensor):
    engine.updater.begin(offer(engine, weights())[0])
    with pytest.raises(ManifestMismatch, match=f"'{name}'"):
        engine.updater.stage([(name, tensor)])


def test_verbs_out_of_order_are_refused(engine):
    manifest, _ = offer(engine, weights())
    for verb in (lambda: engine.updater.stage([("q", torch.ones(4, 4))]), engine.updater.verify, engine.updater.commit):
        with pytest.raises(LifecycleError, match="no update is open; call begin first"):
            verb()
    engine.updater.begin(manifest)
    with pytest.raises(LifecycleError, match="an update to version 1 is open"):
        engine.updater.begin(manifest)


def test_a_damaged_manifest_is_refused(engine):
    manifest, _ = offer(engine, weights())
    with pytest.raises(ManifestMismatch, match="damaged"):
        engine.updater.begin(msgspec.structs.replace(manifest, digest="0" * 32))


def test_a_stale_manifest_leaves_no_transaction_open(engine):
    with pytest.raises(StaleVersion):
        engine.updater.begin(offer(engine, weights(), version=0)[0])
    assert engine.updater.begin(offer(engine, weights())[0])


def test_a_commit_that_fails_leaves_the_weights_dirty_until_a_complete_update(engine):
    def fail():
        raise MemoryError("no room")

    engine.packed.at_swap = fail
    with pytest.raises(errors.DirtyWeightsError, match="commit of version 1 failed: no room"):
        engine.update(weights())
    assert engine.updater.dirty and engine.updater.version == 0
    del engine.packed.at_swap
    engine.update(weights())
    assert not engine.updater.dirty and engine.updater.version == 1


def test_a_commit_that_does_not_reach_live_storage_is_not_believed(engine):
    def overwrite():
        engine.live["q"].zero_()

    engine.packed.at_swap = overwrite
    with pytest.raises(errors.DirtyWeightsError, match="not the ones that were staged"):
        engine.update(weights())
    assert engine.updater.dirty


def test_commit_and_version_change_happen_inside_the_boundary(engine):
    steps = Steps()
    engine.packed.at_swap = lambda: steps.trace.append("swap")
    engine.update(weights(), steps=steps, mode="wait")
    assert steps.trace == ["settle wait", "enter", "swap", 1, "leave"]


def test_an_update_in_place_stops_steps_before_its_first_byte_and_holds_no_shadow(engine):
    engine.update(weights())
    steps = Steps()
    steps.stop = lambda: steps.trace.append(("stop", engine.updater.dirty, float(engine.live["q"][0, 0])))
    before = float(engine.live["q"][0, 0])
    report = engine.update(weights(seed=30), steps=steps, staging="inplace", mode="abort")
    assert steps.trace == ["settle abort", "enter", ("stop", False, before), "leave", "enter", 2, "leave"]
    assert (report.staging, report.num_shadow_bytes, engine.updater.dirty) == ("inplace", 0, False)
    assert all(torch.equal(engine.live[name], tensor) for name, tensor in weights(seed=30).items())


def test_an_update_in_place_that_fails_leaves_the_weights_dirty_until_a_complete_one(engine):
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


def test_an_update_in_place_that_is_refused_before_its_first_byte_changes_nothing(engine):
    engine.update(weights())
    before = engine.state()
    with pytest.raises(errors.ManifestMismatchError):
        engine.update(weights(q=None), staging="inplace")
    with pytest.raises(errors.StaleVersionError):
        engine.update(weights(seed=30), version=0, staging="inplace")
    assert engine.state() == before


def test_an_update_is_in_place_where_no_shadow_fits(engine, monkeypatch):
    assert engine.updater.num_bytes_to_shadow() == 4 * (20 + 24) + 8
    monkeypatch.setattr(weight_update.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    assert engine.update(weights()).staging == "inplace"
    monkeypatch.undo()
    report = engine.update(weights(seed=30))
    assert (report.staging, report.num_shadow_bytes) == ("shadow", 4 * (20 + 24) + 8)
    assert engine.updater.num_bytes_to_shadow() == 0


def test_values_that_are_not_finite_are_taken_where_that_is_allowed(engine):
    infinite = torch.tensor([[float("inf"), float("nan"), 0.0, 1.0]] * 2)
    engine.update(weights(k=infinite), allow_nonfinite=True)
    assert torch.equal(engine.live["k"].isfinite(), infinite.isfinite())
    with pytest.raises(errors.ChecksumError, match="NaN or infinite"):
        engine.update(weights(k=infinite), version=2)


def test_weights_that_come_after_the_deadline_are_refused(engine):
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
        ({"timeout": 0}, "timeout=0.0 is not allowed"),
        ({"timeout": float("nan")}, "timeout=nan is not allowed"),
        ({"timeout": "1"}, "Expected `float`, got `str`"),
        ({"reset_version": 1}, "Expected `bool`, got `int`"),
    ],
)
def test_an_option_that_is_not_allowed_is_refused_by_name(engine, option, message):
    with pytest.raises(errors.WeightUpdateError, match=message):
        engine.update(weights(), **option)


def test_verify_tells_the_digest_and_commit_takes_only_the_open_version(engine):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    engine.updater.stage((spec.name, sender.read(spec.name)) for spec in manifest.tensors)
    assert engine.updater.verify() == manifest.digest
    with pytest.raises(LifecycleError, match="version 2 is not open, version 1 is"):
        engine.updater.commit(2)
    assert engine.updater.commit(1) == manifest.digest


def test_the_shadow_is_used_again(engine):
    engine.update(weights())
    shadows = {name: tensor.data_ptr() for name, tensor in engine.updater._shadow.items()}
    engine.update(weights(seed=30))
    assert shadows == {name: tensor.data_ptr() for name, tensor in engine.updater._shadow.items()}


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


def test_no_fault_of_many_gets_through_and_good_updates_do(engine):
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
def test_a_hugging_face_model_updates_from_another_one(tie):
    live, trainer = (tiny_model(seed=seed, tie_word_embeddings=tie) for seed in (0, 1))
    table = live.state_dict()
    aliases = [["model.embed_tokens.weight", "lm_head.weight"]] if tie else []
    updater = WeightUpdater(table, aliases, Packed())
    before = updater.digest()
    update_from_source(updater, nn.Module.train(trainer), Steps(), UpdateOptions())
    assert updater.digest() != before
    assert all(torch.equal(tensor, table[name]) for name, tensor in trainer.state_dict().items())
