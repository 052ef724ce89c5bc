"""Adapters inside the compiled layers: the modules' bits for every row, whichever adapters a step mixes."""

import random

import pytest
import torch

from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.kernels.adapters import AdapterRows, AdapterTable
from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.kernels.cpu.decoder import DecoderAdapters
from rollout_engine.model.cpu.adapters import CpuAdapterPool
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.testing import random_adapter
from tests.unit.model.cpu.test_decoder import DTYPES, MODELS, paged, prepared, random_steps

pytestmark = [
    pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("own_products"),
]


def patterned(module, seed):
    """An adapter of some linears, whose ranks differ by linear and by layer."""
    wide = random_adapter(module, seed=seed, rank=24, targets=["v_proj", "o_proj", "down_proj"]).tensors
    narrow = random_adapter(module, seed=seed, rank=5, targets=["q_proj", "down_proj", "up_proj"]).tensors
    tensors = {name: each for name, each in (wide | narrow).items() if "layers.0.self_attn.o_proj" not in name}
    swapped = "layers.1.mlp.down_proj"
    tensors |= {name: each for name, each in wide.items() if swapped in name}
    config = {"r": 5, "lora_alpha": 9, "rank_pattern": {swapped: 24, "v_proj": 24, "o_proj": 24}}
    return LoRARequest("patterned", tensors=tensors, config=config)


def pool_of(module):
    """Slot 0: all linears; 1: some, of several ranks; 2: one linear alone; 3 is free."""
    pool = CpuAdapterPool(module, max_loras=4, max_rank=64)
    requests = random_adapter(module, rank=40), patterned(module, 1), random_adapter(module, targets=["v_proj"])
    for slot, request in enumerate(requests):
        pool.install(slot, pool.prepare_adapter(request))
    return pool


def both_ways(module, geometry, block_size=16):
    """The model with layers as one call, and as modules, with the same adapters."""
    pool = pool_of(module)
    return [paged(module, geometry, block_size, compiled=way, adapters=pool) for way in (True, False)]


def computed(model, step, slots, rows=None):
    """Logits of these rows, or of all, each chunk under the adapter of its slot."""
    sizes = [len(chunk.token_ids) for chunk in step]
    rows = range(sum(sizes)) if rows is None else rows
    return model.forward_rows(step, rows, AdapterRows.of(slots, sizes)).take(slice(None))


@pytest.mark.quick(1)
@DTYPES
@pytest.mark.parametrize("name", [name for name in MODELS if "window" not in name and name != "mistral"])
def test_every_bit_is_that_of_the_modules(name, dtype):
    module, geometry = prepared(name.split()[0], dtype, **MODELS[name])
    rng = random.Random(f"adapters {name} {dtype}")
    block_size = rng.choice([16, 64])
    ours, theirs = both_ways(module, geometry, block_size)
    for _ in range(2):
        slots = {}
        for step in random_steps(rng, block_size):
            for chunk in step:
                slots.setdefault(chunk.block_ids[0], rng.choice([-1, 0, 1, 2]))
            mixed = [slots[chunk.block_ids[0]] for chunk in step]
            count = sum(len(chunk.token_ids) for chunk in step)
            rows = rng.sample(range(count), rng.choice([count, rng.randrange(1, count + 1), 0]))
            torch.set_num_threads(rng.choice([1, 2]))
            mine = computed(ours, step, mixed, rows)
            torch.set_num_threads(rng.choice([1, 2]))
            assert torch.equal(mine, computed(theirs, step, mixed, rows))
    assert all(torch.equal(a, b) for a, b in zip(ours.kv.tensors(), theirs.kv.tensors(), strict=True))


@DTYPES
def test_many_rows_decode_under_many_adapters(dtype):
    module, geometry = prepared("qwen3", dtype)
    ours, theirs = both_ways(module, geometry)
    step, slots = [SequenceChunk([5 + i], 0, [i]) for i in range(30)], [i % 4 - 1 for i in range(30)]
    mine = computed(ours, step, slots)
    assert torch.equal(mine, computed(theirs, step, slots))
    alone = [computed(ours, [chunk], [slot]) for chunk, slot in zip(step, slots, strict=True)]
    assert torch.equal(mine, torch.cat(alone))
    without = computed(ours, step, [-1] * 30)
    is_base = torch.tensor(slots) < 0
    assert torch.equal(mine[is_base], without[is_base])
    assert not (mine[~is_base] == without[~is_base]).all(-1).any()


def test_blocks_of_rows_may_lie_across_the_mlps_pieces():
    module, geometry = prepared("qwen3", num_hidden_layers=1)
    ours, theirs = both_ways(module, geometry, 64)
    sizes, slots = [1, 1021, 3, 471], [0, -1, 0, 1]  # rows 1,022 to 1,024 have one adapter
    tables = [list(range(16 * i, 16 * i + 16)) for i in range(4)]
    step = [SequenceChunk([i % 250 for i in range(n)], 0, table) for n, table in zip(sizes, tables, strict=True)]
    assert torch.equal(computed(ours, step, slots), computed(theirs, step, slots))


def test_adapters_are_seen_when_they_change():
    module, geometry = prepared("llama")
    ours, theirs = both_ways(module, geometry)
    pool, step, slots = ours.adapters, [SequenceChunk([5, 6, 7], 0, [0]), SequenceChunk([5, 6], 0, [1])], [0, 3]
    seen = []
    for change in (
        lambda: None,
        lambda: pool.install(0, pool.prepare_adapter(random_adapter(module, seed=5, rank=3))),
        lambda: pool.install(3, pool.prepare_adapter(random_adapter(module, seed=6, rank=60, targets=["o_proj"]))),
        lambda: pool.install(
            0, pool.prepare_adapter(random_adapter(module, seed=7, targets=["up_proj"]))
        ),  # fewer linears
        lambda: pool.remove(0),
        lambda: [pool.remove(slot) for slot in range(4)],
    ):
        change()
        seen.append(computed(ours, step, slots))
        assert torch.equal(seen[-1], computed(theirs, step, slots))
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])
    assert torch.equal(seen[-1], computed(ours, step, [-1, -1]))


def test_adapters_are_seen_after_new_weights():
    module, geometry = prepared("qwen2")
    ours, theirs = both_ways(module, geometry)
    step = [SequenceChunk([5, 6, 7], 0, [0])]
    before = computed(ours, step, [0])
    module.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    after = computed(ours, step, [0])
    assert not torch.equal(after, before) and torch.equal(after, computed(theirs, step, [0]))


def test_the_layers_run_as_one_call_under_adapters(monkeypatch):
    module, geometry = prepared("llama")
    ours, theirs = both_ways(module, geometry)

    def forward(*args, **kwargs):
        raise AssertionError("a layer runs as a module")

    monkeypatch.setattr(module.model.layers[1], "forward", forward)
    computed(ours, [SequenceChunk([5], 0, [0])], [0])
    with pytest.raises(AssertionError, match="as a module"):
        computed(theirs, [SequenceChunk([5], 0, [0])], [0])


def test_adapters_and_rows_that_do_not_fit_are_refused():
    module, geometry = prepared("llama")
    model, _ = both_ways(module, geometry)
    step = [SequenceChunk([5, 6, 7], 0, [0])]
    with pytest.raises(ValueError, match="should be below 3, and one is 3"):
        model.forward_rows(step, [2], AdapterRows.of([0], [4]))
    decoder = model.decoder._current()
    table = AdapterTable(1, 57, [64], torch.float32)
    activations = torch.zeros(3, 64), torch.zeros(3, 16), torch.zeros(3, 16)
    arguments = *activations, torch.tensor([2]), model.kv.plan(FlatBatch.of(step))
    for tables, match in (([table] * 20, "in_features.* are of .57, 64"), ([None] * 3, "20 tables, .*, and have 3")):
        with pytest.raises(ValueError, match=match):
            decoder.run(*arguments, (DecoderAdapters(tables), AdapterRows.of([0], [3])))
