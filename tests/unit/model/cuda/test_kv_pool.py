"""The KV pool on a device: blocks are copied as if each were read before any is written, in few launches."""

import pytest
import torch

from rollout_engine.kernels.triton.block_copies import BlockCopies
from rollout_engine.model.cuda.attention import CudaKVPool
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.state_geometry import StateGeometry

NUM_BLOCKS = 8


@pytest.fixture
def pool(device):
    """Two layers, each block filled with its number."""
    layer = LayerGeometry(2, 1, 8, 16, scale=1.0, sliding_window=None, softcap=None, has_sinks=False)
    where = torch.device(device)
    made = CudaKVPool([layer] * 2, num_blocks=NUM_BLOCKS, block_size=4, dtype=torch.float32, device=where)
    refill(made)
    return made


def refill(pool):
    for tensor in pool.tensors():
        tensor[:] = torch.arange(NUM_BLOCKS, device=tensor.device)[:, None, None, None]


def held(pool):
    """The number in each block, the same in every tensor and at every place."""
    (numbers,) = {tuple(tensor.flatten(1).unique(dim=1)[:, 0].tolist()) for tensor in pool.tensors()}
    return list(numbers)


@pytest.fixture
def launched(monkeypatch):
    """Numbers of pairs of each launch."""
    counts, run = [], BlockCopies.run
    monkeypatch.setattr(BlockCopies, "run", lambda self, pairs: counts.append(len(pairs)) or run(self, pairs))
    return counts


@pytest.mark.parametrize(
    ("pairs", "launches", "wanted"),
    [
        ([], [], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([(1, 5), (1, 6), (2, 7)], [3], [0, 1, 2, 3, 4, 1, 1, 2]),
        ([(1, 5), (2, 1), (3, 2), (4, 7)], [1, 1, 2], [0, 2, 3, 3, 4, 1, 6, 4]),  # blocks written after they were read
    ],
)
def test_blocks_are_copied_by_one_launch_where_none_is_read_and_written(pool, launched, pairs, launches, wanted):
    pool.copy_blocks(pairs)
    assert held(pool) == wanted and launched == launches


def test_a_pool_that_has_moved_is_copied_where_it_is(pool):
    pool.copy_blocks([(1, 2)])
    pool.release()
    pool.memory.restore()
    refill(pool)
    pool.copy_blocks([(3, 0)])
    assert held(pool) == [3, 1, 2, 3, 4, 5, 6, 7]


def test_states_are_released_with_kv_and_no_copy_of_blocks_moves_them(device):
    keeping = LayerGeometry.without_attention(StateGeometry(((3, 5),), (2, 4, 6)))
    attending = LayerGeometry(2, 1, 8, 16, scale=1.0, sliding_window=None, softcap=None, has_sinks=False)
    options = {"num_blocks": NUM_BLOCKS, "block_size": 4, "dtype": torch.bfloat16, "device": torch.device(device)}
    made = CudaKVPool([keeping, attending, keeping], **options, num_state_slots=3)
    assert list(made.layers) == [1] and len(list(made.tensors())) == 2
    first, _, last = made.states.layers
    assert first.convolutions[0].shape == (3, 3, 5) and first.convolutions[0].dtype is torch.bfloat16
    assert last.recurrence.shape == (3, 2, 4, 6) and last.recurrence.dtype is torch.float32
    last.recurrence[1] = 7.0
    made.copy_blocks([(1, 2)])
    assert last.recurrence[1].eq(7.0).all() and not last.recurrence[2].any()
    before = made.num_resident_bytes
    made.release()
    assert made.num_resident_bytes == 0
    made.memory.restore()
    assert made.num_resident_bytes == before and not last.recurrence.any()
