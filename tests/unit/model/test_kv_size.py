"""The size of a KV pool, and the memory that bounds it: the host's, or the device's that holds the pool."""

from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from rollout_engine import ConfigError, EngineConfig, SpeculationConfig
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.model.kv_size import (
    DRAFT_SHARE,
    bytes_of_states,
    bytes_per_block,
    bytes_per_state,
    size_pool,
    size_states,
)
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.state_geometry import StateGeometry

HOST, DEVICE = 1000, 5000
BLOCK_BYTES = 64
"""One layer of one head of 1 + 1 channels, 16 tokens, bfloat16."""


class OneLayer:
    geometry = (LayerGeometry(1, 1, 1, 1, scale=1.0, sliding_window=None, softcap=None, has_sinks=False),)
    dtype = torch.bfloat16
    max_model_len = 16
    vocab_size = 10
    num_ranks = 1
    module = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))]))


@pytest.fixture(autouse=True)
def memories(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=HOST, available=HOST))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (DEVICE // 2, DEVICE))


def on_device(**options):
    config = EngineConfig(model="model", block_size=16, **options)
    return CudaBackend._num_blocks(SimpleNamespace(_config=config, _loaded=OneLayer), 16)


@pytest.mark.parametrize("options", [{"num_kv_blocks": DEVICE // BLOCK_BYTES}, {"kv_cache_bytes": DEVICE}])
def test_a_pool_of_a_device_may_be_larger_than_the_hosts_memory(options):
    assert on_device(**options) == DEVICE // BLOCK_BYTES
    with pytest.raises(ConfigError, match=f"this machine has {HOST} in all"):
        size_pool(EngineConfig(model="model", block_size=16, **options), OneLayer)


def test_a_layer_that_reads_the_keys_of_another_takes_no_memory():
    class SharedLayers(OneLayer):
        geometry = (*OneLayer.geometry, msgspec.structs.replace(OneLayer.geometry[0], kv_layer=0))

    assert bytes_per_block(SharedLayers, 16) == bytes_per_block(OneLayer, 16) == BLOCK_BYTES


def test_a_layer_of_latents_caches_its_keys_alone():
    fields = dict(num_heads=128, num_kv_heads=1, head_dim_k=576, head_dim_v=512, scale=1.0)
    layer = LayerGeometry(**fields, sliding_window=None, softcap=None, has_sinks=False, has_latents=True)
    loaded = SimpleNamespace(geometry=[layer, layer], dtype=torch.bfloat16)
    assert bytes_per_block(loaded, 16) == 2 * 16 * 576 * 2


def test_a_pool_larger_than_its_device_is_refused():
    with pytest.raises(ConfigError, match=f"kv_cache_bytes=5001 asks for 5001 bytes .* this device has {DEVICE}"):
        on_device(kv_cache_bytes=DEVICE + 1)


GIB = 1 << 30


class Loaded(OneLayer):
    """A model of so many bytes, on an empty device of 100 GiB where steps and weights take twice as much."""

    def __init__(self, weight_bytes):
        storage = SimpleNamespace(data_ptr=lambda: 1, nbytes=lambda: weight_bytes)
        tensor = SimpleNamespace(device=torch.device("cuda", 0), untyped_storage=lambda: storage)
        self.module = SimpleNamespace(parameters=lambda: iter([tensor]), buffers=lambda: iter([tensor]))


@pytest.fixture
def pool_of(monkeypatch):
    """A function from bytes of weights and options to bytes of the KV pool, in GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)

    def size(weights, drafting=None, **options):
        config = EngineConfig(model="model", block_size=16, max_num_seqs=2**20, max_model_len=2**20, **options)
        loaded = Loaded(weights * GIB)
        backend = SimpleNamespace(_config=config, _loaded=loaded, _fused=True, _drafting=drafting, routing=None)
        backend._peak_bytes = lambda model_len, device: 2 * weights * GIB
        for name in ("_graph_bytes", "_update_bytes", "_draft_bytes"):
            setattr(backend, name, getattr(CudaBackend, name).__get__(backend))
        return CudaBackend._num_blocks(backend, 16) * BLOCK_BYTES / GIB

    return size


def test_an_update_and_graphs_are_left_room_by_default(pool_of):
    graphs = 1 + 2**20 * 10 * 2 / GIB
    assert pool_of(10) == pytest.approx(90 - 20 - graphs - 10, abs=1e-3)
    assert pool_of(10, reserve_for_updates=False) == pytest.approx(90 - 20 - graphs, abs=1e-3)
    assert pool_of(10, cuda_graphs=False) == pytest.approx(90 - 20 - 10, abs=1e-3)


def test_a_draft_model_is_left_room_for_its_kv_and_its_graphs(pool_of):
    graphs = 1 + 2**20 * 10 * 2 / GIB
    by_share = SpeculationConfig(draft_model="draft")
    given = SpeculationConfig(draft_model="draft", draft_kv_cache_bytes=7 * GIB)
    assert pool_of(10, by_share, cuda_graphs=False) == pytest.approx(60 * DRAFT_SHARE / (DRAFT_SHARE + 1), abs=1e-3)
    assert pool_of(10, given, cuda_graphs=False) == pytest.approx(60 - 7, abs=1e-3)
    assert pool_of(10, given) == pytest.approx(60 - 2 * graphs - 7, abs=1e-3)


def test_where_a_second_copy_would_leave_no_pool_updates_are_said_to_be_made_in_place(pool_of, caplog):
    assert pool_of(30, cuda_graphs=False) == pytest.approx(90 - 60, abs=1e-3)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "made in place, and stop steps" in record.getMessage()
    assert "30.0 GiB are left" in record.getMessage()
    caplog.clear()
    assert pool_of(22, cuda_graphs=False) == pytest.approx(90 - 66, abs=1e-3) and not caplog.records


class WithStates(OneLayer):
    """One layer of KV, and one of states: 96 + 64 bytes a slot."""

    geometry = (
        *OneLayer.geometry,
        LayerGeometry.without_attention(StateGeometry(((3, 16),), (1, 4, 4))),
        LayerGeometry.without_attention(None),
    )
    module = SimpleNamespace()


def slots(num_blocks=100, **options):
    config = EngineConfig(model="model", block_size=16, max_num_seqs=3, **options)
    return size_states(config, WithStates, num_blocks)


def test_states_of_all_sequences_have_slots_and_the_prefix_cache_the_rest():
    assert bytes_per_state(WithStates) == 2 * 3 * 16 + 4 * 16 == 160
    assert bytes_per_block(WithStates, 16) == BLOCK_BYTES
    assert slots(enable_prefix_caching=False) == 3 + 1
    assert slots() == 4 + 6
    assert slots(num_blocks=10) == 4 + 10 * BLOCK_BYTES // 2 // 160
    assert slots(state_cache_bytes=0) == 4
    assert slots(state_cache_bytes=479) == 4 + 2
    assert slots(state_cache_bytes=0, speculation=SpeculationConfig(max_draft_tokens=2)) == 4 + 2


@pytest.mark.parametrize("room", [0, 700, 1500, 3000, 5000])
@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"state_cache_bytes": 480}])
def test_states_of_a_device_take_what_the_pool_next_to_them_leaves(room, options):
    config = EngineConfig(model="model", block_size=16, max_num_seqs=3, **options)
    taken = bytes_of_states(config, WithStates, room, DEVICE)
    num_blocks = max(room - taken, 0) // BLOCK_BYTES
    num_slots = size_states(config, WithStates, num_blocks, DEVICE)
    assert 4 * 160 <= num_slots * 160 <= taken < num_slots * 160 + 160
    assert options or room < 1500 or num_slots > 4


class OnTwoRanks(WithStates):
    num_ranks = 2


def test_a_budget_of_states_is_of_all_ranks_together():
    options = dict(model="model", block_size=16, max_num_seqs=1)
    assert size_states(EngineConfig(**options, state_cache_bytes=640), OnTwoRanks, 100) == 2 + 2
    with pytest.raises(ConfigError, match=r"max_num_seqs=3 asks for 1280 bytes of states"):
        size_states(EngineConfig(**options | dict(max_num_seqs=3)), OnTwoRanks, 100)


def test_states_that_do_not_fit_memory_are_refused():
    with pytest.raises(ConfigError, match=f"state_cache_bytes=1001 asks for 1001 bytes of states; .* {HOST} in all"):
        slots(state_cache_bytes=HOST + 1)
    with pytest.raises(ConfigError, match=r"max_num_seqs=10 asks for 1760 bytes of states"):
        size_states(EngineConfig(model="model", block_size=16, max_num_seqs=10), WithStates, 1)


def test_a_model_without_states_has_no_slots_for_them():
    assert size_states(EngineConfig(model="model", block_size=16), OneLayer, 1) == 0
    with pytest.raises(ConfigError, match="no layer of SimpleNamespace does"):
        size_pool(EngineConfig(model="model", block_size=16, state_cache_bytes=1), OneLayer)
