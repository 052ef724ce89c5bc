"""The slots that chunks read and write, and the pool of states."""

import pytest
import torch

from rollout_engine.base.messages import ScheduledSequence, StateMove
from rollout_engine.model.cpu.deterministic import make_deterministic
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mixers import swap_mixers
from rollout_engine.model.modules.state_pool import StatePool
from rollout_engine.model.sequences.state_slots import StateSlots
from rollout_engine.testing import tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES


def starts(*sizes):
    return torch.tensor([0, *sizes]).cumsum(0).numpy()


def test_a_step_moves_states_and_later_ones_work_in_place():
    slots = StateSlots()
    first = [
        ScheduledSequence(7, 0, 5, [], state=StateMove(-1, 2, [(2, 4), (3, 1)])),
        ScheduledSequence(8, 0, 1, [], state=StateMove(0, 3)),
    ]
    chunks = slots.chunks(first, starts(5, 1))
    assert chunks.sources.tolist() == [-1, 0]
    assert chunks.write_starts.tolist() == [0, 3, 4]
    assert chunks.write_ends.tolist() == [2, 3, 5, 6]
    assert chunks.write_slots.tolist() == [4, 1, 2, 3]
    chunks = slots.chunks([ScheduledSequence(8, 1, 1, []), ScheduledSequence(7, 5, 1, [])], starts(1, 1))
    assert (chunks.sources.tolist(), chunks.write_slots.tolist()) == ([3, 2], [3, 2])
    slots.forget([7, 9])
    with pytest.raises(ValueError, match="Sequence 7 is computed without a slot"):
        slots.chunks([ScheduledSequence(7, 6, 1, [])], starts(1))


def paged(architecture):
    module = tiny_model(architecture, **HYBRID_SIZES[architecture]).requires_grad_(False)
    module.set_attn_implementation("rollout_engine")
    swap_mixers(module)
    geometry = probe_geometry(module)
    assert make_deterministic(module, geometry) is None
    return CpuModel(module, geometry, num_blocks=8, block_size=16, num_state_slots=4)


@pytest.mark.parametrize("architecture", ["lfm2", "bamba", "qwen3_5_text"])
def test_chunks_of_several_sequences_compute_what_each_alone_does(architecture):
    model = paged(architecture)
    tokens = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    alone = model.forward([SequenceChunk(tokens, 0, [0, 1, 2], 0)], range(40))
    model.forward([SequenceChunk(tokens[:9], 0, [3, 4, 5], 3), SequenceChunk(tokens[:1], 0, [6], 1)], [0])
    rest = model.forward([SequenceChunk([5], 1, [6], 1), SequenceChunk(tokens[9:], 9, [3, 4, 5], 3)], range(1, 32))
    assert torch.equal(rest, alone[9:])


def test_a_batch_without_slots_is_refused():
    model = paged("lfm2")
    with pytest.raises(ValueError, match="names no slots of them"):
        model.forward(FlatBatch.of([SequenceChunk([5, 6], 0, [0])]), [0])


def test_memory_of_states_is_released_with_that_of_kv():
    model = paged("bamba")
    model.forward([SequenceChunk([5, 6], 0, [0], 2)], [0])
    states = model.kv.states
    assert any(tensor[2].any() for tensor in states.tensors())
    before = model.kv.num_resident_bytes
    model.kv.release()
    assert model.kv.num_resident_bytes <= before
    assert StatePool([], num_slots=0, dtype=torch.float32).is_empty
