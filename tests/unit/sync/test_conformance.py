"""What every transport does alike, most with the receiver in another process."""

import pytest
import torch

import sync
import sync.manifest
from sync.errors import ManifestMismatch, SyncError
from sync.transports import TRANSPORTS

DEVICES_NEEDED = {"ipc": 1, "nccl": 2}


def when_possible(name):
    """The transport's name, skipped where there are too few CUDA devices: there it stays unproven."""
    count = DEVICES_NEEDED.get(name, 0)
    skip = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"{name} needs {count} CUDA devices")
    return pytest.param(name, marks=[pytest.mark.gpu, skip] if count else [])


@pytest.fixture(params=[when_possible(name) for name in TRANSPORTS])
def link(request, make_link):
    return make_link(request.param)


def weights(seed=0):
    """Shapes that do not align, an empty one, a scalar, several dtypes; sizes on both sides of a small bucket."""
    random = torch.Generator().manual_seed(seed)
    floats = {
        f"layer.{i}.weight": torch.randn(shape, generator=random)
        for i, shape in enumerate([(7, 3), (1,), (), (0, 4), (500, 41)])
    }
    halves = {"half": torch.randn(5, 5, generator=random).bfloat16(), "strided": floats["layer.0.weight"].t()}
    return floats | halves | {"steps": torch.arange(3), "mask": torch.tensor([True, False])}


def test_what_arrives_is_what_the_manifest_says(link):
    source = weights()
    manifest = link.push(source, version=7)
    assert manifest.version == 7
    assert {spec.name for spec in manifest.tensors} == set(source)
    manifest.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_of_a_device_arrive_as_those_of_the_host(link):
    source = {name: tensor.cuda() for name, tensor in weights().items()}
    metadata = {"layer.4.weight": ("bfloat16", (500, 41))}
    assert link.push(source, 7, metadata).digest == link.offer(weights(), 8, metadata).digest


def test_tensors_are_received_straight_into_a_shadow(link):
    manifest = link.offer(weights(), version=7)
    answers, error = link.deliver(manifest, "receive_into")
    assert error is None and all(answer.matches(manifest) for answer in answers)
    old = manifest
    link.offer(weights(1), version=8)
    answers, _ = link.deliver(old, "receive_into")
    assert {answer.error for answer in answers} <= {"SyncError", "ManifestMismatch"}


def test_floats_are_cast_to_the_receivers_dtypes_on_the_way(link):
    source = {"a": torch.randn(40, 30), "b": torch.arange(3)}
    manifest = link.push(source, metadata={"a": ("bfloat16", (40, 30)), "b": ("int64", (3,))})
    assert [(spec.name, spec.dtype) for spec in manifest.tensors] == [("a", "bfloat16"), ("b", "int64")]
    assert manifest.tensors[0].digest == sync.digests.tensor_digest(source["a"].bfloat16())


def test_tied_tensors_travel_once(link):
    weight = torch.ones(2)
    manifest = link.push({"embed": weight, "norm": torch.ones(2), "head": weight})
    assert manifest.aliases == [["embed", "head"]]
    assert [spec.name for spec in manifest.tensors] == ["embed", "norm"]


def test_one_link_serves_update_after_update_of_any_size(link):
    for version, size in enumerate([10, 100_000, 10, 200_000], start=1):
        link.push({"w": torch.full((size,), float(version))}, version)


def test_a_version_no_longer_on_offer_is_refused(link):
    old = link.offer(weights(1), version=1)
    link.offer(weights(2), version=2)
    answers, _ = link.deliver(old)
    assert {answer.error for answer in answers} <= {"SyncError", "ManifestMismatch"}
    assert all("ersion 1" in answer.message for answer in answers)


def test_the_link_works_after_a_source_was_refused(link):
    with pytest.raises(ManifestMismatch, match="'b' is on the meta device"):
        link.offer({"a": torch.ones(2), "b": torch.empty(2, device="meta")}, version=1)
    link.push(weights(), version=1)


def test_once_the_sender_is_closed_only_what_was_published_can_be_received(link):
    manifest = link.push(weights())
    link.sender.close()
    for shadow in link.shadows:
        shadow.receive(manifest)
        answer = shadow.answer()
        assert answer.matches(manifest) if link.name == "store" else answer.error in ("SyncError", "TransferTimeout")


def test_an_empty_source_is_delivered_too(link):
    assert link.push({}).tensors == []


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("make", [sync.make_sender, sync.make_receiver])
def test_options_that_do_not_fit_are_refused_by_name(name, make):
    with pytest.raises(SyncError, match=rf"\['paper'\] do not fit weight transport '{name}'"):
        make(name, paper="plane")


@pytest.mark.parametrize("name", DEVICES_NEEDED)
@pytest.mark.parametrize("device,message", [("cpu", "'shm' or 'gloo'"), ("paper", "is not a device")])
def test_a_transport_of_the_wrong_device_is_refused_with_the_right_one(tmp_path, name, device, message):
    place = {"rendezvous": f"file://{tmp_path}/r", "world_size": 2} if name == "nccl" else {"directory": tmp_path}
    with pytest.raises(SyncError, match=message):
        sync.make_sender(name, device=device, **place)
    with pytest.raises(SyncError, match=message):
        sync.make_receiver(name, device=device, **place | ({"rank": 1} if name == "nccl" else {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("name", DEVICES_NEEDED)
def test_without_a_device_its_transports_are_refused(tmp_path, name):
    place = {"rendezvous": f"file://{tmp_path}/r", "world_size": 2} if name == "nccl" else {"directory": tmp_path}
    with pytest.raises(SyncError, match="needs a CUDA device, and torch sees none here"):
        sync.make_sender(name, **place)
