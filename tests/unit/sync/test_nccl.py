"""The nccl transport's group, with stand-ins for a device and for torch's NCCL."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

import sync
from sync import nccl
from sync.groups import GroupConfig

VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Group:
    """Notes what its constructor reads from the environment, as torch's does."""

    seen: list
    problem = None

    def __init__(self, store, rank, world_size, options):
        Group.seen.append((os.environ.get(VARIABLE), options._timeout.total_seconds()))
        Group.handling = os.environ.get(HANDLING)
        if Group.problem is not None:
            raise Group.problem

    def eager_connect_single_device(self, device):
        assert os.environ.get(VARIABLE) != "1", "only the constructor is to see it"

    def abort(self):
        pass


@pytest.fixture
def group(monkeypatch):
    """`Group`, for torch's; devices are the host."""
    Group.seen, Group.problem = [], None
    Group.Options = SimpleNamespace
    monkeypatch.setattr(nccl, "c10d", SimpleNamespace(ProcessGroupNCCL=Group, PrefixStore=lambda name, store: store))
    monkeypatch.setattr(nccl, "cuda_device", lambda transport, name: torch.device("cpu"))
    monkeypatch.setattr(nccl, "_cuda", SimpleNamespace(Stream=lambda device: contextlib.nullcontext()))
    return Group


@pytest.fixture
def joined(tmp_path, group):
    """A function: make both ends and wait until their groups have formed or failed; closed in the end."""
    ends = []

    def make():
        place = {"rendezvous": f"file://{tmp_path}/rendezvous", "world_size": 2, "timeout": 60.0, "bucket_bytes": 100}
        ends.extend([sync.make_sender("nccl", **place), sync.make_receiver("nccl", rank=1, **place)])
        for end in ends:
            end._end.group.await_thread(60)
        return ends

    yield make
    for end in ends:
        end.close()


@pytest.mark.parametrize("former", [None, "0"])
def test_a_group_raises_where_it_is_waited_for_and_has_no_watchdog(joined, group, monkeypatch, former):
    monkeypatch.setenv(VARIABLE, former) if former else monkeypatch.delenv(VARIABLE, raising=False)
    assert all(end.ready() for end in joined())
    assert group.seen == [("1", 60.0), ("1", 60.0)]
    assert os.environ.get(VARIABLE) == former, "the trainer's own groups are as they would be"


def test_a_group_that_cannot_be_made_leaves_the_environment_as_it_was(joined, group, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    group.problem = RuntimeError("no device")
    sender = joined()[0]
    with pytest.raises(sync.TransferTimeout, match="no device"):
        sender.ready()
    assert VARIABLE not in os.environ


def test_a_group_of_ranks_waits_on_the_device_alone_and_its_watchdog_ends_no_process(group, monkeypatch):
    monkeypatch.setenv(VARIABLE, "true")
    monkeypatch.delenv(HANDLING, raising=False)
    nccl.connect_ahead(None, GroupConfig("file:///nowhere", 0, 2, 60.0), device=torch.device("cpu"))
    assert group.seen == [("0", 30 * 86_400.0)] and group.handling == "0"
    assert os.environ[VARIABLE] == "true" and HANDLING not in os.environ
