"""A gloo group forms in the background, keeps its deadlines and ends for everybody at once."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

import sync
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.gloo import run_patiently
from sync.manifest import WeightManifest
from tests.unit.sync.receiving import Receiving

WEIGHTS = {f"w{i}": torch.full((100,), float(i)) for i in range(40)}
PLACE = {"world_size": 2, "bucket_bytes": 2000, "timeout": 600.0}


@pytest.fixture
def ends(tmp_path):
    """A function: both ends of a group of two, closed in the end."""
    made = []

    def make(sender_changes=(), receiver_changes=()):
        place = PLACE | {"rendezvous": f"file://{tmp_path}/rendezvous-{len(made)}"}
        made.append(sync.make_sender("gloo", **place | dict(sender_changes)))
        made.append(sync.make_receiver("gloo", rank=1, **place | dict(receiver_changes)))
        return made[-2:]

    yield make
    for end in made:
        end.close()


def push(sender, receiver, source):
    manifest = sender.offer(source, 1, {})
    receiving = Receiving(receiver, manifest)
    try:
        sender.send()
    finally:
        receiving.join()
    return receiving


def test_ends_are_made_at_once_and_ready_when_all_have_come(tmp_path):
    place = PLACE | {"rendezvous": f"file://{tmp_path}/rendezvous"}
    start = time.monotonic()
    sender = sync.make_sender("gloo", **place)
    assert not sender.ready()  # nobody else has come, so it did not wait for them
    receiver = sync.make_receiver("gloo", rank=1, **place)
    while not (sender.ready() and receiver.ready()):
        assert time.monotonic() - start < 60
        time.sleep(0.01)
    assert push(sender, receiver, WEIGHTS).tensors.keys() == WEIGHTS.keys()
    receiver.close()
    sender.close()


def test_the_trainers_own_group_is_left_alone(tmp_path, ends):
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/own", rank=0, world_size=1)
    try:
        receiving = push(*ends(), WEIGHTS)
        assert all(torch.equal(receiving.tensors[name], WEIGHTS[name]) for name in WEIGHTS)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_nothing_listens_off_the_loopback(ends):
    sender, receiver = ends()
    push(sender, receiver, WEIGHTS)
    tcp = {"rendezvous": f"tcp://127.0.0.1:{free_port()}"}
    push(*ends(tcp, tcp), WEIGHTS)
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) <= {"127.0.0.1"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_rank_that_never_comes_is_a_timeout(tmp_path):
    sender = sync.make_sender("gloo", rendezvous=f"file://{tmp_path}/r", world_size=2, timeout=0.5)
    sender.offer(WEIGHTS, 1, {})
    with pytest.raises(TransferTimeout, match="weight group of 2 did not form within 0.5 s"):
        sender.send()
    with pytest.raises(TransferTimeout):
        sender.ready()
    sender.close()


@pytest.mark.slow
def test_a_receiver_that_does_not_listen_is_a_timeout_and_ends_the_group(ends):
    sender, receiver = ends({"timeout": 5.0}, {"timeout": 5.0})  # it has to form within that, too
    while not receiver.ready():
        time.sleep(0.01)
    sender.offer(WEIGHTS, 1, {})
    with pytest.raises((TransferTimeout, SyncError)):
        sender.send()
    with pytest.raises(SyncError, match="Make a new sender and new receivers with a new rendezvous"):
        sender.send()


@pytest.mark.parametrize("stop_after", [1, 20, 39])
def test_a_receiver_that_breaks_off_is_an_error_at_the_sender(ends, stop_after):
    sender, receiver = ends()
    manifest = sender.offer(WEIGHTS, 1, {})
    receiving = Receiving(receiver, manifest, stop_after)
    start = time.monotonic()
    with pytest.raises(SyncError):
        sender.send()
    receiving.join()
    assert time.monotonic() - start < PLACE["timeout"] / 2


def test_a_sender_that_goes_is_an_error_at_the_receiver(ends):
    sender, receiver = ends()
    manifest = sender.offer(WEIGHTS, 1, {})
    receiving = Receiving(receiver, manifest)
    while not sender.ready():
        time.sleep(0.01)
    start = time.monotonic()
    sender.close()
    receiving.join()
    assert isinstance(receiving.problem, SyncError)
    assert time.monotonic() - start < PLACE["timeout"] / 2


@pytest.mark.parametrize(
    "number,error",
    [
        (signal.SIGKILL, SyncError),
        pytest.param(signal.SIGSTOP, TransferTimeout, marks=pytest.mark.slow),
    ],
)
def test_a_worker_killed_or_stopped_is_an_error_at_the_sender(tmp_path, shadow_processes, number, error):
    (shadow,) = shadow_processes(1)
    place = PLACE | {"rendezvous": f"file://{tmp_path}/rendezvous", "timeout": 5.0}
    sender = sync.make_sender("gloo", **place)
    shadow.open("gloo", place | {"rank": 1})
    while not sender.ready():
        time.sleep(0.01)
    manifest = sender.offer(WEIGHTS, 1, {})
    shadow.process.send_signal(signal.SIGSTOP)
    shadow.receive(manifest)  # which it does not hear; once it is killed, nobody would take the message
    shadow.process.send_signal(number)
    with pytest.raises(error):
        sender.send()
    sender.close()
    shadow.process.kill()
    shadow.process.wait()


def test_a_receiver_closed_from_another_thread_does_not_wait_for_a_sender_to_come(tmp_path):
    place = PLACE | {"rendezvous": f"file://{tmp_path}/rendezvous", "timeout": 600.0}
    receiver = sync.make_receiver("gloo", rank=1, **place)
    receiving = Receiving(receiver, sync.make_sender("inproc").offer(WEIGHTS, 1, {}))
    receiver.close()
    receiving.join(60)
    assert isinstance(receiving.problem, SyncError)


def test_closing_a_receiver_does_not_wait_for_its_step(ends):
    sender, receiver = ends({"timeout": 600.0}, {"timeout": 600.0})
    while not (sender.ready() and receiver.ready()):
        time.sleep(0.01)
    receiving = Receiving(receiver, sync.make_sender("inproc").offer(WEIGHTS, 1, {}))
    time.sleep(0.1)  # it waits for the header, or is about to
    receiver.close()
    sender.close()
    receiving.join(60)
    assert isinstance(receiving.problem, SyncError)


@pytest.mark.slow
def test_a_process_may_end_while_groups_form(tmp_path):
    script = """
import sync, sync.groups, sys
sync.groups._EXIT_SECONDS = 5.0
ends = []
for i in range(20):
    place = dict(rendezvous=f"file://{sys.argv[1]}/{i}", world_size=2, timeout=600.0)
    ends += [sync.make_sender("gloo", **place), sync.make_receiver("gloo", rank=1, **place)]
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=300)
    # torch may log a connection that was cut; what it must not do is to abort, or to raise in a thread.
    assert done.returncode == 0 and not {"terminate", "Traceback"} & set(done.stderr.split()), done.stderr


def test_other_weights_or_buckets_are_refused_by_all_and_the_group_lives(ends):
    sender, receiver = ends()
    manifest = sender.offer(WEIGHTS, 1, {})
    other = sync.make_sender("inproc").offer(WEIGHTS | {"w3": torch.zeros(100)}, 1, {})
    receiving = Receiving(receiver, other)
    with pytest.raises(ManifestMismatch, match="1 of 2 ranks have another manifest"):
        sender.send()
    receiving.join()
    assert isinstance(receiving.problem, ManifestMismatch)
    receiving = Receiving(receiver, manifest)
    sender.send()
    receiving.join()
    assert receiving.tensors.keys() == WEIGHTS.keys()


def test_buckets_of_other_sizes_are_refused(ends):
    sender, receiver = ends({}, {"bucket_bytes": 3000})
    with pytest.raises(ManifestMismatch, match="bucket_bytes"):
        push(sender, receiver, WEIGHTS)


def test_without_an_offer_nothing_is_sent(ends):
    with pytest.raises(SyncError, match="Nothing is on offer"):
        ends()[0].send()


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"rendezvous": "/some/path"}, "rendezvous='/some/path' is not allowed: must be file://"),
        ({"rendezvous": "tcp://host"}, "must be file://"),
        ({"rendezvous": "tcp://host:port"}, "must be file://"),
        ({"rendezvous": "env://"}, "must be file://"),
        ({"world_size": 1}, "world_size=1 is not allowed"),
        ({"timeout": 0}, "timeout=0 is not allowed"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 is not allowed"),
        ({"bucket_bytes": 1.5}, "bucket_bytes=1.5 is not allowed"),
    ],
)
def test_what_cannot_be_a_group_is_refused(tmp_path, changes, message):
    place = PLACE | {"rendezvous": f"file://{tmp_path}/rendezvous"}
    with pytest.raises(SyncError, match=message):
        sync.make_sender("gloo", **place | changes)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(tmp_path, rank):
    with pytest.raises(SyncError, match=f"rank={rank}, world_size=2 is not allowed"):
        sync.make_receiver("gloo", rendezvous=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2)


def test_a_rendezvous_file_that_another_process_keeps_locked_is_a_timeout(tmp_path):
    """torch would wait for that lock without an end, and keep every other thread from running meanwhile."""
    with open(tmp_path / "r", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        receiver = sync.make_receiver(
            "gloo", rendezvous=f"file://{tmp_path}/r", rank=1, world_size=2, timeout=0.5, bucket_bytes=2000
        )
        with pytest.raises(TransferTimeout, match="did not form within 0.5 s"):
            list(receiver.receive(WeightManifest.of(1, [])))
    receiver.close()


def test_a_pipe_in_place_of_the_rendezvous_file_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "r")
    receiver = sync.make_receiver("gloo", rendezvous=f"file://{tmp_path}/r", rank=1, world_size=2, timeout=60.0)
    with pytest.raises(TransferTimeout, match="it is a named pipe, not a regular file"):
        list(receiver.receive(WeightManifest.of(1, [])))
    receiver.close()


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), 1e7])
def test_a_wait_without_an_end_is_refused(tmp_path, timeout):
    with pytest.raises(SyncError, match="must be seconds, more than 0, at most 1e[+]06"):
        sync.make_receiver("gloo", rendezvous=f"file://{tmp_path}/r", rank=1, world_size=2, timeout=timeout)


class LateWork:
    """A step that ends right behind the time to look at it, well or with an error."""

    def __init__(self, error=None):
        self._error, self._has_ended = error, False

    def wait(self, timeout=None):
        if not self._has_ended:
            self._has_ended = True
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error

    def is_completed(self):
        return self._has_ended


def test_a_patient_step_that_ends_as_it_is_looked_at_has_its_own_result():
    group = SimpleNamespace(wait_for_ranks=lambda: None, has_left=False)
    run_patiently(group, lambda _: LateWork())
    with pytest.raises(RuntimeError, match="Connection reset"):
        run_patiently(group, lambda _: LateWork(RuntimeError("Connection reset by peer")))
