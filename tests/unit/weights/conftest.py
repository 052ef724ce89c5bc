"""Live weights as an engine keeps them, without an engine."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from rollout_engine.base.messages import UpdateOptions
from rollout_engine.model.cpu.shadow_memory import CpuShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.transaction import WeightUpdater
from rollout_engine.weights.update import update_from_source
from sync.inproc import InprocSender


class Packed(PackedWeights):
    """Packed copies of a model without linears; `at_swap` is called within the commit."""

    num_swaps = 0
    at_swap = staticmethod(lambda: None)

    def __init__(self):
        super().__init__(nn.Module())

    def swap(self):
        self.num_swaps += 1
        self.at_swap()


class Steps:
    """A `StepControl` without an engine: `trace` records the calls."""

    def __init__(self, num_in_flight=5):
        self.num_in_flight, self.trace = num_in_flight, []

    @contextmanager
    def boundary(self, deadline):
        self.trace.append("enter")
        yield
        self.trace.append("leave")

    def drain(self, mode, deadline):
        self.trace.append(f"drain {mode}")

    def stop(self):
        self.trace.append("stop")

    def commit_version(self, version):
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
        self.updater = WeightUpdater.of(self.live, [["embed", "head"]], self.packed, CpuShadowMemory())

    @property
    def num_commits(self):
        return self.packed.num_swaps

    def update(self, source, version=None, steps=None, **options):
        return update_from_source(self.updater, source, steps or Steps(), UpdateOptions.from_values(**options), version)

    def state(self):
        return self.updater.digest(), self.updater.version, self.num_commits, self.updater.dirty


def random_tensor(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weights(seed=10, dtype=torch.float32, **changes):
    """A complete update under the part names; `changes` replace tensors, None removes one."""
    parts = {
        "embed": random_tensor((5, 4), seed, dtype),
        "q": random_tensor((4, 4), seed + 1, dtype),
        "k": random_tensor((2, 4), seed + 2, dtype),
        "steps": torch.tensor(seed),
    }
    return {name: tensor for name, tensor in (parts | changes).items() if tensor is not None}


def make_offer(engine, source, version=1):
    sender = InprocSender()
    manifest = sender.offer(source, version, engine.updater.metadata())
    return manifest, sender


@pytest.fixture
def make_engine():
    return Engine


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def make_updater():
    """Over a table of views and no linears."""
    return lambda live, aliases=(): WeightUpdater.of(live, aliases, Packed(), CpuShadowMemory())


@pytest.fixture
def steps():
    return Steps()


@pytest.fixture
def weights():
    return make_weights


@pytest.fixture
def offer():
    return make_offer
