"""A shadow on a device is allocated as one, before a tensor is asked for; without room an update is made in place."""

import pytest

from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.model.cpu.shadow_memory import CpuShadowMemory


class Memory(CpuShadowMemory):
    """A device's memory that seems free; `is_full`: somebody else takes it first."""

    num_free_bytes = 1 << 40

    def __init__(self):
        self.is_full, self.allocated = False, []

    def allocate(self, num_bytes):
        if self.is_full:
            raise WeightUpdateError("of 12 GiB")
        self.allocated.append(num_bytes)
        return super().allocate(num_bytes)


@pytest.fixture
def memory(engine):
    """That of `engine`, whose weights seem to lie on a device."""
    memory = Memory()
    held = engine.updater.weights
    held._memory = held._shadow._memory = memory
    held._on_host = False
    return memory


@pytest.mark.parametrize("staging", ["auto", "shadow"])
def test_one_piece_is_allocated_for_all_updates(engine, memory, weights, staging):
    for seed in (1, 2):
        assert engine.update(weights(seed=seed), staging=staging).staging == "shadow"
    assert memory.allocated == [3 * 512]


def test_an_update_goes_in_place_where_what_seemed_free_is_taken(engine, memory, weights):
    memory.is_full = True
    report = engine.update(weights())
    assert (report.staging, report.num_shadow_bytes, engine.updater.version) == ("inplace", 0, 1)


def test_an_update_that_insists_on_a_shadow_fails_before_anything_is_written(engine, memory, weights):
    memory.is_full, before = True, engine.state()
    with pytest.raises(WeightUpdateError, match="of 12 GiB"):
        engine.update(weights(), staging="shadow")
    assert engine.state() == before and engine.updater.num_shadow_bytes == 0


def test_memory_of_the_host_is_not_reserved(engine, weights, monkeypatch):
    memory = Memory()
    held = engine.updater.weights
    held._memory = held._shadow._memory = memory
    engine.update(weights())
    assert len(memory.allocated) == 3, "each storage as it is written"
