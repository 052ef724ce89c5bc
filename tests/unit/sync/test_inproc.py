"""The in-process transport delivers what its manifest announces."""

import subprocess
import sys

import pytest
import torch

import sync
from sync.errors import ManifestMismatch, SyncError
from sync.manifest import describe


def send(source, metadata, version=1):
    sender = sync.make_sender("inproc")
    manifest = sender.offer(source, version, metadata)
    return manifest, dict(sync.make_receiver("inproc", sender=sender).receive(manifest))


def test_what_arrives_is_what_the_manifest_says():
    source = {"a": torch.randn(4, 3), "b": torch.arange(3)}
    manifest, tensors = send(source, {"a": ("bfloat16", (4, 3)), "b": ("int64", (3,))}, version=7)
    assert manifest.version == 7
    assert [describe(name, tensor) for name, tensor in tensors.items()] == manifest.tensors
    assert torch.equal(tensors["a"], source["a"].to(torch.bfloat16))
    manifest.check()


def test_tied_tensors_travel_once():
    weight = torch.ones(2)
    manifest, tensors = send({"embed": weight, "norm": torch.ones(2), "head": weight}, {})
    assert manifest.aliases == [["embed", "head"]]
    assert list(tensors) == ["embed", "norm"]


def test_a_tensor_changed_after_the_offer_no_longer_fits_the_manifest():
    weight = torch.zeros(3)
    sender = sync.make_sender("inproc")
    manifest = sender.offer({"w": weight}, 1, {})
    weight += 1
    ((name, tensor),) = sync.make_receiver("inproc", sender=sender).receive(manifest)
    assert describe(name, tensor) != manifest.tensors[0]


def test_an_iterator_that_repeats_a_name_is_refused():
    manifest, _ = send([("w", torch.ones(1)), ("w", torch.zeros(1))], {})
    with pytest.raises(ManifestMismatch, match="lists w more than once"):
        manifest.check()


def test_closing_lets_go_of_the_source():
    sender = sync.make_sender("inproc")
    manifest = sender.offer({"w": torch.ones(1)}, 1, {})
    sender.close()
    with pytest.raises(KeyError):
        next(sync.make_receiver("inproc", sender=sender).receive(manifest))


@pytest.mark.parametrize("make", [sync.make_sender, sync.make_receiver])
def test_an_unknown_transport_lists_the_known(make):
    with pytest.raises(SyncError, match="Unknown weight transport 'carrier-pigeon'. Known: inproc"):
        make("carrier-pigeon")


def test_options_that_do_not_fit_are_refused_by_name():
    with pytest.raises(SyncError, match=r"\['bucket_bytes'\] do not fit weight transport 'inproc'"):
        sync.make_sender("inproc", bucket_bytes=1)


def test_importing_sync_loads_no_torch_until_a_name_is_used():
    lines = ["import sys, sync, sync.errors", "assert 'torch' not in sys.modules"]
    lines += ["sync.WeightManifest", "assert 'torch' in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_public_names_resolve_and_others_do_not():
    assert all(getattr(sync, name) for name in sync.__all__)
    assert set(sync.__all__) <= set(dir(sync))
    with pytest.raises(AttributeError, match="no attribute 'nccl_sender'"):
        _ = sync.nccl_sender
