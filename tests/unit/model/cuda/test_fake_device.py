"""The fake device orders what CUDA orders, and no more: it tells accesses without an order from those with one."""

import numpy as np
import pytest
import torch

from tests.fake_device.calls import CUDA
from tests.fake_device.device import FakeDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels have to run in Triton's interpreter")
ORDERS = ("eager", "lazy", "random")


@pytest.fixture(params=ORDERS)
def fake(request):
    with FakeDevice(seed=1, order=request.param) as device:
        yield device


def kinds(device):
    """Kinds of the faults in all that was launched."""
    device.finish()
    return {fault.kind for fault in device.faults}


def ones(count=8):
    return torch.ones(count, device=CUDA)


def test_tensors_say_that_they_are_on_the_device_and_compute_what_they_would(fake):
    x = torch.arange(6, device="cuda").view(2, 3).float()
    assert x.is_cuda and not x.is_cpu and x.device == CUDA and x.get_device() == 0
    y = torch.cat([x @ x.t(), x[:, :2]])
    y[1:, 0] += 1
    y[torch.tensor([0, 2], device=CUDA), 1] = 7.0
    assert y.cpu().tolist() == [[5, 7], [15, 50], [1, 7], [4, 4]]
    assert not y.cpu().is_cuda and y.to("cpu", torch.float64).dtype == torch.float64
    assert torch.equal(y, y.clone()) and y.max().item() == 50 and bool((y > 0).all())
    assert y[y > 6].tolist() == [7, 15, 50, 7] and not kinds(fake)


def test_new_memory_is_full_of_nan_and_reading_it_is_a_fault(fake):
    x = torch.empty(4, device=CUDA)
    x[1:] = 1
    moved = torch.cat([x, x.clone()])[5:]
    assert moved.sum().item() == 3 and not kinds(fake), "what nobody has written may be moved"
    assert x.cpu().isnan().tolist() == [True, False, False, False]
    assert kinds(fake) == {"uninitialised"}


@pytest.mark.parametrize("waits", [False, True])
def test_two_streams_are_ordered_by_waits_alone(fake, waits):
    x, side = ones(), torch.cuda.Stream()
    x.add_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(3)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    total = x.sum()
    assert kinds(fake) == (set() if waits else {"race"})
    if waits:
        assert total.item() == 48


def test_reads_of_two_streams_need_no_order(fake):
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    x.sum()
    assert not kinds(fake)


def test_writes_to_different_bytes_need_no_order(fake):
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[::2].add_(1)
    x[1::2].add_(2)
    assert not kinds(fake)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_event_orders_what_was_launched_before_it_was_recorded(fake, is_late):
    x, side, event = ones(), torch.cuda.Stream(), torch.cuda.Event()
    event.synchronize()  # never recorded: nothing to wait for
    if not is_late:
        event.record()
    x.add_(1)
    if is_late:
        event.record()
    with torch.cuda.stream(side):
        side.wait_event(event)
        x.sum()
    assert kinds(fake) == (set() if is_late else {"race"})


def test_what_the_host_has_waited_for_comes_before_all_that_it_launches(fake):
    x, side = ones(), torch.cuda.Stream()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
        event = side.record_event()
    while not event.query():
        torch.cuda.synchronize() if fake.timeline.order == "lazy" else None
    assert x.sum().item() == 16 and not kinds(fake)


@pytest.mark.parametrize("how", ["waits", "records the stream", "neither"])
def test_freed_memory_is_handed_out_at_once_and_used_again_too_early_by_another_stream(fake, how):
    side, x = torch.cuda.Stream(), ones(64)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = x * 2
    address = x.data_ptr()
    if how == "records the stream":
        x.record_stream(side)
    if how == "waits":
        torch.cuda.current_stream().wait_stream(side)
    del x
    y = torch.zeros(64, device=CUDA)
    if how != "records the stream" or fake.timeline.order == "lazy":
        assert (y.data_ptr() == address) == (how != "records the stream")
    found = kinds(fake)
    assert found & {"reuse", "race"} if how == "neither" else not found
    assert how == "neither" or result.tolist() == [2.0] * 64


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_must_not_read_pinned_memory_before_the_copy_has_come(fake, waits):
    x, host = ones(), torch.empty(8, pin_memory=True)
    host.copy_(x.mul(2), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    assert (host.tolist() == [2.0] * 8) or not waits
    assert bool(kinds(fake)) == (not waits)


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_must_not_write_pinned_memory_before_the_copy_has_gone(fake, waits):
    host = torch.empty(8, pin_memory=True)
    host.numpy()[:] = 1
    x = host.to(CUDA, non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    host.numpy()[2:4] = 5
    assert kinds(fake) == (set() if waits else {"race"})
    assert not waits or x.tolist() == [1.0] * 8


def test_pinned_memory_is_not_handed_out_before_its_copies_are_done(fake):
    made = []
    for value in range(4):
        host = torch.empty(8, pin_memory=True)
        host.numpy()[:] = value
        made.append(host.to(CUDA, non_blocking=True))
        del host
    assert [x[0].item() for x in made] == [0, 1, 2, 3] and not kinds(fake)


def test_a_graph_computes_anew_over_the_same_memory(fake):
    x, out, graph = ones(), torch.zeros(8, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        out.copy_(x * 2 + 1)
    assert out.tolist() == [0] * 8
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 8
    assert not kinds(fake)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    x.fill_(1)
    graph.replay()
    assert kinds(fake) == {"stale"}


@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize(), lambda x: x.cpu()])
def test_nothing_may_wait_in_a_capture(fake, wait):
    x = ones()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait(x)
    assert fake.capture is None and x.sum().item() == 8


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("scalar read", lambda x: x.sum().item()),
        ("scalar read", lambda x: bool(x[0] > 0)),
        ("unpinned copy", lambda x: x.tolist()),
        ("nonzero", lambda x: x.nonzero()),
        ("boolean mask", lambda x: x[x > 0]),
        ("boolean mask", lambda x: x.__setitem__(x > 0, x[:1])),
        ("unpinned copy", lambda x: torch.tensor([1.0], device=x.device)),
        ("unpinned copy", lambda x: torch.zeros(8).to(x.device, non_blocking=True)),
        ("unpinned copy", lambda x: x[[1, 2]]),
        ("unpinned copy", lambda x: x.cpu()),
        ("blocking copy", lambda x: torch.zeros(8).pin_memory().to(x.device)),
        ("stream", lambda x: torch.cuda.current_stream().synchronize()),
        ("device", lambda x: torch.cuda.synchronize()),
    ],
)
def test_every_wait_is_seen(fake, kind, act):
    x = ones()
    fake.waits_seen.clear()
    act(x)
    assert {wait.kind for wait in fake.waits_seen} == {kind}
    assert "act" in fake.waits_seen[0].functions or "<lambda>" in fake.waits_seen[0].functions


def test_what_waits_for_nothing_is_not_seen(fake):
    x = ones()
    y = torch.where(x > 0, x, 0.0).masked_fill_(x > 5, 1.0)[torch.arange(3, device=CUDA)]
    torch.zeros(8).pin_memory().to(CUDA, non_blocking=True)
    y.to("cpu", non_blocking=True)
    assert fake.waits_seen == [] and not kinds(fake)


def test_a_failure_on_the_device_is_raised_where_the_host_waits(fake):
    x = torch.full((2,), 9, device=CUDA)
    with pytest.raises(RuntimeError, match="an operation failed on the fake device"):
        ones()[x]
        torch.cuda.synchronize()


def test_a_seed_decides_the_order():
    def run(seed):
        order, done = FakeDevice(seed), []
        streams = [order.timeline.new_stream(str(i)) for i in range(3)]
        for place in range(30):
            order.timeline.launch(streams[place % 3], "", lambda operation: done.append(str(operation)), place)
        order.finish()
        return done

    assert run(1) == run(1) != run(2)


def test_outside_it_nothing_has_changed(fake):
    assert np.array_equal(torch.zeros(2).numpy(), np.zeros(2)) and not torch.zeros(2).is_cuda
