"""The in-process transport delivers what its manifest announces."""

import subprocess
import sys

import pytest
import torch

import sync
from sync.errors import ManifestMismatch, SyncError
from sync.manifest import describe


def test_a_tensor_changed_after_the_offer_no_longer_fits_the_manifest():
    weight = torch.zeros(3)
    sender = sync.make_sender("inproc")
    manifest = sender.offer({"w": weight}, 1, {})
    weight += 1
    ((name, tensor),) = sync.make_receiver("inproc", sender=sender).receive(manifest)
    assert describe(name, tensor) != manifest.tensors[0]


def test_an_iterator_that_repeats_a_name_is_refused():
    with pytest.raises(ManifestMismatch, match="The source lists w more than once"):
        sync.make_sender("inproc").offer([("w", torch.ones(1)), ("w", torch.zeros(1))], 1, {})


def test_closing_lets_go_of_the_source():
    sender = sync.make_sender("inproc")
    manifest = sender.offer({"w": torch.ones(1)}, 1, {})
    sender.close()
    with pytest.raises(SyncError, match="not, or no longer, on offer"):
        next(sync.make_receiver("inproc", sender=sender).receive(manifest))


@pytest.mark.parametrize("make", [sync.make_sender, sync.make_receiver])
def test_an_unknown_transport_lists_the_known(make):
    with pytest.raises(SyncError, match="Unknown weight transport 'carrier-pigeon'. Known: .*inproc"):
        make("carrier-pigeon")


def test_importing_sync_loads_no_torch_until_a_name_is_used():
    lines = ["import sys, sync, sync.errors", "assert 'torch' not in sys.modules"]
    lines += ["sync.WeightManifest", "assert 'torch' in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_public_names_resolve_and_others_do_not():
    assert all(getattr(sync, name) for name in sync.__all__)
    assert set(sync.__all__) <= set(dir(sync))
    with pytest.raises(AttributeError, match="no attribute 'nccl_sender'"):
        _ = sync.nccl_sender
