"""The verbs of the transaction: what each refuses, and that nothing has changed then."""

import msgspec
import pytest
import torch

from rollout_engine.base.errors import LifecycleError
from sync.errors import ChecksumMismatch, ManifestMismatch, StaleVersion


def test_an_update_can_be_aborted_at_any_point(engine, weights, offer):
    before = engine.state()
    manifest, sender = offer(engine, weights())
    for num_staged in range(5):
        assert engine.updater.begin(manifest)
        for spec in manifest.tensors[:num_staged]:
            engine.updater.stage([(spec.name, sender.read(spec.name))])
        engine.updater.abort()
        assert engine.state() == before
    engine.updater.abort()


def test_an_incomplete_update_cannot_be_verified(engine, weights, offer, steps):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    for name in ("embed", "q"):
        engine.updater.stage([(name, sender.read(name))])
    with pytest.raises(ChecksumMismatch, match="2 tensors of the manifest never arrived: k, steps"):
        engine.updater.verify()


def test_tensors_of_an_earlier_update_do_not_count_as_arrived(engine, weights, offer):
    engine.update(weights())
    engine.updater.begin(offer(engine, weights(seed=30), version=2)[0])
    with pytest.raises(ChecksumMismatch, match="4 tensors of the manifest never arrived"):
        engine.updater.verify()


def test_one_flipped_bit_on_the_way_is_found(engine, weights, offer):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    for spec in manifest.tensors:
        tensor = sender.read(spec.name).clone()
        if spec.name == "k":
            tensor.view(torch.int32)[1, 3] ^= 1 << 7
        engine.updater.stage([(spec.name, tensor)])
    with pytest.raises(ChecksumMismatch, match="'k' changed on the way"):
        engine.updater.verify()


def test_what_is_staged_after_verify_must_be_verified_again(engine, weights, offer):
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
def test_a_tensor_that_the_manifest_did_not_announce_is_refused(engine, name, tensor, weights, offer):
    engine.updater.begin(offer(engine, weights())[0])
    with pytest.raises(ManifestMismatch, match=f"'{name}'"):
        engine.updater.stage([(name, tensor)])


def test_verbs_out_of_order_are_refused(engine, weights, offer):
    manifest, _ = offer(engine, weights())
    for verb in (lambda: engine.updater.stage([("q", torch.ones(4, 4))]), engine.updater.verify, engine.updater.commit):
        with pytest.raises(LifecycleError, match="no update is open; call begin first"):
            verb()
    engine.updater.begin(manifest)
    with pytest.raises(LifecycleError, match="an update to version 1 is open"):
        engine.updater.begin(manifest)


def test_only_what_was_committed_is_confirmed_and_only_once(engine, weights, offer):
    engine.update(weights())
    with pytest.raises(LifecycleError, match="confirm: no commit waits for it"):
        engine.updater.confirm()


def test_a_damaged_manifest_is_refused(engine, weights, offer):
    manifest, _ = offer(engine, weights())
    with pytest.raises(ManifestMismatch, match="damaged"):
        engine.updater.begin(msgspec.structs.replace(manifest, digest="0" * 32))


def test_a_stale_manifest_leaves_no_transaction_open(engine, weights, offer):
    with pytest.raises(StaleVersion):
        engine.updater.begin(offer(engine, weights(), version=0)[0])
    assert engine.updater.begin(offer(engine, weights())[0])


def test_verify_and_confirm_tell_the_digest_and_commit_takes_only_the_open_version(engine, weights, offer):
    manifest, sender = offer(engine, weights())
    engine.updater.begin(manifest)
    engine.updater.stage((spec.name, sender.read(spec.name)) for spec in manifest.tensors)
    assert engine.updater.verify() == manifest.digest
    with pytest.raises(LifecycleError, match="version 2 is not open, version 1 is"):
        engine.updater.commit(2)
    engine.updater.commit(1)
    assert engine.updater.confirm() == manifest.digest
