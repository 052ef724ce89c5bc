"""The kernel finds the same digests and values that are not finite as the host."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sync import digest_kernel, digests, manifest, tensor_check, tensor_writer  # noqa: E402
from sync.digests import tensor_digest  # noqa: E402
from sync.finite import is_finite, markers  # noqa: E402
from sync.gloo import GlooReceiver, GlooSender  # noqa: E402
from sync.ipc import HandleReceiver, HandleSender  # noqa: E402
from sync.tensor_check import TensorCheck  # noqa: E402
from tests.unit.kernels.triton.conftest import device, interpreter  # noqa: E402, F401
from tests.unit.sync.host_memory import HostMemory, shared  # noqa: E402

PIECE = 2048
"""Bytes: the interpreter is slow."""
SIZES = [0, 1, 16, 240, 241, 256, 1000, 1024, 1025, PIECE - 1, PIECE, PIECE + 240, PIECE + 241, 3 * PIECE + 1088]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.fixture
def small_pieces(monkeypatch):
    """On both sides."""
    for module in (digests, digest_kernel):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture
def results_of(monkeypatch, device):  # noqa: F811
    """A function from tensors to the results of the kernel."""
    for module in (manifest, tensor_check):
        monkeypatch.setattr(module, "supports", lambda tensor: True)

    def check_all(*tensors):
        check = TensorCheck(check_finite=True)
        for tensor in tensors:
            check.add(tensor.to(device))
        return check.results()

    return check_all


def random_bytes(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_digests_are_those_of_the_library_at_every_size(results_of, small_pieces):
    tensors = [random_bytes(size) for size in SIZES]
    assert results_of(*tensors) == [(tensor_digest(tensor), True) for tensor in tensors]


def test_pieces_of_the_real_size(results_of):
    tensor = random_bytes(digests.PIECE_BYTES + 3000)
    assert results_of(tensor) == [(tensor_digest(tensor), True)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int8, torch.bool])
def test_every_dtype_has_the_digest_of_its_bytes(results_of, small_pieces, dtype):
    tensor = (torch.arange(1300) % 97 - 40).to(dtype).view(26, 50)
    assert results_of(tensor, tensor[0, 0]) == [(tensor_digest(tensor), True), (tensor_digest(tensor[0, 0]), True)]


@pytest.mark.parametrize("start", [1, 3, 8])
def test_a_tensor_may_start_anywhere(results_of, small_pieces, start):
    tensor = random_bytes(PIECE + 700 + start)[start:]
    assert results_of(tensor) == [(tensor_digest(tensor), True)]


def test_strides_do_not_matter(results_of, small_pieces):
    tensor = torch.randn(60, 50)
    assert results_of(tensor.t(), tensor[:, ::2]) == [(tensor_digest(x), True) for x in (tensor.t(), tensor[:, ::2])]


def test_the_device_is_waited_for_once_for_all(results_of, small_pieces, monkeypatch):
    brought, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(digest_kernel, "_LAUNCH_BYTES", 3000)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: brought.append(tensor.nbytes) or cpu(tensor))
    results_of(*(random_bytes(size) for size in (100, 240, 3 * PIECE + 5, PIECE, 0, 241)))
    assert brought == [24 * (3 + 1 + 1) + 100 + 240 + 5]


def test_a_kernel_with_the_results_of_the_host_is_used(device, caplog):  # noqa: F811
    assert tensor_check._device_is_supported.__wrapped__(torch.device(device)) and not caplog.records


class Wrong(digest_kernel.DeviceCheck):
    def results(self):
        return [("0" * 32, True), ("0" * 32, False)]


class Failing(digest_kernel.DeviceCheck):
    def launch(self):
        raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    "kind,why", [(Wrong, "results differ from the host's"), (Failing, "RuntimeError: no compiler")]
)
def test_the_host_checks_and_the_log_says_so_where_the_kernel_does_not_work(device, monkeypatch, caplog, kind, why):  # noqa: F811
    monkeypatch.setattr(digest_kernel, "DeviceCheck", kind)
    assert not tensor_check._device_is_supported.__wrapped__(torch.device(device))
    assert f"Weights on {device} are copied to the host for their digests: " in caplog.text and why in caplog.text


def test_no_tensors_have_no_results(results_of):
    assert results_of() == []


def test_a_cast_made_for_its_digest_is_let_go_before_the_end(results_of, small_pieces, monkeypatch):
    monkeypatch.setattr(digest_kernel, "_LAUNCH_BYTES", 3000)
    launched, launch = [], digest_kernel.DeviceCheck.launch
    monkeypatch.setattr(
        digest_kernel.DeviceCheck, "launch", lambda self: launched.append(len(self._pending)) or launch(self)
    )
    tensors = [random_bytes(size) for size in (1000, 2000, 100, 3300, 700)]
    assert results_of(*tensors) == [(tensor_digest(tensor), True) for tensor in tensors]
    assert launched == [2, 2, 1], "the last with the results"


def test_what_is_checked_is_copied_on_the_way_and_may_then_change(results_of, small_pieces, device):  # noqa: F811
    tensors = [random_bytes(size) for size in SIZES]
    sources = [tensor.to(device, copy=True) for tensor in tensors]
    around = [torch.full((len(tensor) + 64,), 77, dtype=torch.uint8, device=device) for tensor in tensors]
    outs = [whole[32 : len(whole) - 32] for whole in around]
    check = TensorCheck(check_finite=True)
    for source, out in zip(sources, outs, strict=True):
        check.add(source, out)
    check.launch()
    for source in sources:
        source.fill_(1)
    assert check.results() == [(tensor_digest(tensor), True) for tensor in tensors]
    for tensor, whole, out in zip(tensors, around, outs, strict=True):
        assert torch.equal(out.cpu(), tensor) and set(whole[:32].tolist() + whole[-32:].tolist()) == {77}


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [lambda x: x[0], lambda x: x[0].t().contiguous().t(), lambda x: x.flatten()[1:1801]])
def test_places_and_sources_may_be_of_any_form_on_the_way(results_of, small_pieces, device, dtype, place):  # noqa: F811
    out = place(torch.zeros(2, 40, 45, dtype=dtype)).view(40, 45).to(device)
    for source in (torch.randn(40, 45), torch.randn(45, 40).t(), torch.randn(1801)[1:].view(40, 45)):
        check = TensorCheck(check_finite=True)
        check.add(source.to(device), out)
        assert check.results() == [(tensor_digest(source.to(dtype)), True)]
        assert torch.equal(out.cpu(), source.to(dtype))


def ipc_ends(folder):
    meeting = folder / "ipc"
    sender = HandleSender(meeting, HostMemory(folder), timeout=60.0, bucket_bytes=3000)
    return sender, HandleReceiver(meeting, HostMemory(folder), timeout=60.0)


def broadcast_ends(folder):
    """The protocol of nccl."""
    place = {"rendezvous": f"file://{folder}/group", "world_size": 2, "timeout": 60.0, "bucket_bytes": 3000}
    return GlooSender(**place), GlooReceiver(**place, rank=1)


@pytest.mark.quick(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter takes tensors of the host for a device's")
@pytest.mark.parametrize("make_ends", [ipc_ends, broadcast_ends])
def test_weights_of_another_process_never_come_to_the_host(results_of, small_pieces, tmp_path, monkeypatch, make_ends):
    monkeypatch.setattr(tensor_writer, "supports", lambda tensor: True)
    sender, receiver = make_ends(tmp_path)
    memory = HostMemory(tmp_path) if make_ends is broadcast_ends else sender._memory
    in_place = dict(zip("abc", shared(memory, *(torch.randn(size) for size in (700, 3, 600))), strict=True))
    packed = {name: torch.randn(size).double() for name, size in (("d", 400), ("e", 500), ("f", 1), ("g", 300))}
    packed["g"][7] = float("nan")
    source = in_place | packed
    wanted = {name: (tensor_digest(tensor.float()), name != "g") for name, tensor in source.items()}
    for module in (tensor_writer, tensor_check):
        monkeypatch.setattr(module, "tensor_bytes", None)
    shadow = {name: torch.zeros(len(tensor)) for name, tensor in source.items()}
    manifest = sender.offer(source, 1, {name: ("float32", tuple(tensor.shape)) for name, tensor in source.items()})
    with ThreadPoolExecutor() as pool:
        arrivals = pool.submit(receiver.receive_into, shadow, manifest)
        sender.send()
        assert arrivals.result() == wanted
    assert {spec.name: spec.digest for spec in manifest.tensors} == {
        name: digest for name, (digest, _) in wanted.items()
    }
    assert all(torch.equal(shadow[name], tensor.float()) for name, tensor in source.items() if name != "g")
    receiver.close()
    sender.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(results_of, small_pieces, dtype):
    """In a whole block, in the rest of a piece, in its last bytes, in the rest of the tensor; of either sign."""
    size = (PIECE + PIECE // 2 + 500) // dtype.itemsize
    fine = torch.linspace(-1, 1, size, dtype=torch.float64).to(dtype)
    largest = torch.full((300,), torch.finfo(dtype).max, dtype=torch.float64)
    cases = [fine, largest.to(dtype), (-largest[:3]).to(dtype)]
    bad = [float("nan")] if dtype == torch.float8_e4m3fn else [float("nan"), float("inf"), float("-inf")]
    for i, place in enumerate([0, PIECE // dtype.itemsize - 1, PIECE // dtype.itemsize + 70, size - 1]):
        case = fine.clone()
        case[place] = bad[i % len(bad)]
        cases.append(case)
    found = results_of(*cases, cases[-1][-1:])
    assert [finite for _, finite in found] == [True] * 3 + [False] * 5
    assert found[0].digest == tensor_digest(fine)


@pytest.mark.parametrize("dtype", FLOATS)
def test_markers_tell_every_pattern_of_bits_as_its_value_does(dtype):
    width = dtype.itemsize
    patterns = torch.arange(1 << 8 * min(width, 2), dtype=torch.int64)
    patterns = patterns << (8 * max(width - 2, 0))
    masks, carries, signs = (marker & ((1 << 8 * width) - 1) for marker in markers(dtype))
    marked = [bool(((bits & masks) + carries) & signs) for bits in (p % (1 << 8 * width) for p in patterns.tolist())]
    values = patterns.view(torch.uint8).view(-1, 8)[:, :width].contiguous().view(dtype).flatten()
    assert marked == [not finite for finite in values.double().isfinite().tolist()]
    assert is_finite(values[:0].view(torch.uint8).numpy().data, dtype)
