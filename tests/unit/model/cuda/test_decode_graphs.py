"""Which graphs are captured, and which one a step replays; the model is a stand-in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rollout_engine.base.messages import NewSequence, ScheduledSequence
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.triton.shared_prefix import SharedPrefixes
from rollout_engine.kernels.triton.work import COLUMNS
from rollout_engine.model.cuda import captured_graphs, decode_graphs
from rollout_engine.model.cuda.captured_graphs import GraphPool, NoRoomForGraph
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs, Variant
from rollout_engine.model.cuda.decode_inputs import DecodeStep
from rollout_engine.model.cuda.flat_columns import FlatColumns
from rollout_engine.model.cuda.sequence_rows import SequenceRows

VOCAB_SIZE = 10


class Model:
    """Has each row's position as its logits."""

    def __init__(self, device):
        self.module, self.device = nn.Linear(1, 1, device=device), torch.device(device)
        self.kv = SimpleNamespace(block_size=4, states=SimpleNamespace(is_empty=True))
        self.attention = SimpleNamespace(plan=lambda batch: None)
        self.decoder = SimpleNamespace(vocab_size=VOCAB_SIZE, write_logits=self.write_logits)
        self.adapters = SimpleNamespace(layout=((7, 16),))
        self.outs, self.blocks = [], None

    def write_logits(self, batch, pool, out):
        self.outs.append(out)
        out[:] = batch.positions[:, None]
        self.blocks = None if batch.adapters is None else batch.adapters.blocks.tolist()


class Graph:
    """A computation in place of a graph; `replays` has the size and variant of each."""

    replays: list

    def __init__(self, key, compute):
        self._key, self._compute = key, compute

    def replay(self):
        self.replays.append(self._key)
        self._compute()


@pytest.fixture(autouse=True)
def inference_mode():
    """Ends as in a runner's steps."""
    with torch.inference_mode():
        yield


@pytest.fixture
def graphs(device, monkeypatch):
    """A function from problems by (size, has prefixes) to graphs of up to 8 sequences, those of problems excepted."""
    monkeypatch.setattr(decode_graphs, "draw_plainly", lambda *args: None)
    Graph.replays = []

    def make(problems=()):
        problems, keys = dict(problems), []

        def capture(compute):
            key = keys[-1]
            if key in problems:
                raise problems[key]
            compute()
            return Graph(key, compute)

        def capture_one(size, variant):
            keys.append((size, *variant) if variant.has_adapters else (size, variant.has_prefixes))
            return DecodeGraphs._capture_one(made, size, variant)

        made = DecodeGraphs(
            *(Model(device), SequenceRows(8, torch.device(device)), 8),
            vocab_size=VOCAB_SIZE,
            shares_prefixes=True,
            capture=capture,
        )
        made.tried, made.problems, made._capture_one = keys, problems, capture_one
        return made

    return make


def step(graphs, count, *, has_prefixes=False):
    """A step of `count` sequences, sequence i at position i + 1."""
    rows, numbers = graphs._rows, list(range(count))
    rows.add(number for number in numbers if number not in rows.tables())
    known = {
        number: NewSequence(number, [5] * (number + 2), number + 2, SamplingParams(), seed=0) for number in numbers
    }
    scheduled = [ScheduledSequence(number, number + 1, 1, [number]) for number in numbers]
    changes = rows.learn(scheduled)
    flat = FlatColumns.of(scheduled, known, rows.rows(numbers), rows.matrix, 4)
    prefixes = SharedPrefixes(np.zeros((1, COLUMNS), np.int32), np.ones(count, np.int32)) if has_prefixes else None
    return DecodeStep(flat, None, prefixes, changes)


def test_all_graphs_write_their_logits_to_the_same_memory(graphs):
    made = graphs()
    made.capture_all()
    for count in (8, 3, 1):
        logits, _ = made.run(step(made, count))
        assert logits[:, 0].tolist() == [index + 1 for index in range(count)]
    assert len({out.data_ptr() for out in made._model.outs}) == 1
    assert made._logits.shape == (8, VOCAB_SIZE)
    made.void()
    assert made._logits is None, "a sleeping engine does not hold it"


def test_a_step_replays_the_smallest_graph_that_was_captured_and_holds_it(graphs):
    made = graphs()
    made.capture_all()
    made._captured[Variant(False, False)] = [1, 8]
    for count, has_prefixes, key in [
        (1, False, (1, False)),
        (2, False, (8, False)),
        (3, False, (8, False)),
        (3, True, (4, True)),
    ]:
        logits, _ = made.run(step(made, count, has_prefixes=has_prefixes))
        assert len(logits) == count and Graph.replays[-1] == key


def test_graphs_with_adapters_are_captured_by_the_steps_that_need_them_until_other_layers_have_some(graphs):
    made = graphs()
    made.capture_all()
    num_plain, plan = len(made.tried), AdapterRows.of([3, -1, 3], [1, 1, 1], 16)
    for has_prefixes, keys in [(False, [(4, False, True)]), (True, [(4, True, True)]), (True, []), (False, [])]:
        before = len(made.tried)
        logits, _ = made.run(step(made, 3, has_prefixes=has_prefixes)._replace(adapters=plan))
        assert made.tried[before:] == keys and Graph.replays[-1] == (4, has_prefixes, True)
        assert logits[:, 0].tolist() == [1, 2, 3]
        assert made._model.blocks == [[0, 2, 3], [0, 0, 0], [0, 0, 0], [0, 0, 0]], "blocks that are none have no rows"
    made._model.adapters.layout = ((7, 16), (9, 32))
    made.run(step(made, 3)._replace(adapters=plan))
    assert len(made.tried) == num_plain + 3
    made.run(step(made, 3))
    assert Graph.replays[-1] == (4, False) and made._model.blocks is None


def test_a_step_with_adapters_and_no_graph_for_them_runs_without(graphs):
    made = graphs({(4, False, True): RuntimeError("not permitted")})
    made.capture_all()
    plan = AdapterRows.of([3], [1], 16)
    assert made.run(step(made, 3)._replace(adapters=plan)) is None
    assert made.run(step(made, 1)._replace(adapters=plan)) is None, "nothing is captured after a failure"
    assert made.run(step(made, 3)) is not None


def test_a_step_with_prefixes_and_no_graph_for_them_replays_the_plain_one_and_reads_them_apart(graphs):
    made = graphs()
    made.capture_all()
    made._captured[Variant(True, False)] = []
    sent = []
    put = made._inputs.put
    made._inputs.put = lambda each, size: sent.append(each.prefixes) or put(each, size)
    assert made.run(step(made, 3, has_prefixes=True)) is not None
    assert Graph.replays == [(4, False)] and sent == [None]


def test_graphs_without_room_are_left_out_and_smaller_ones_are_captured(graphs, caplog):
    made = graphs({(8, True): NoRoomForGraph("3 MiB are free"), (8, False): NoRoomForGraph("4 MiB are free")})
    made.capture_all()
    assert sorted(made._graphs) == [
        (n, Variant(has_prefixes, False)) for n in (1, 2, 4) for has_prefixes in (False, True)
    ]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "6 of 8 CUDA graphs were captured" in warning and "for 8 sequences: 4 MiB are free" in warning
    assert made.run(step(made, 5)) is None and made.run(step(made, 3)) is not None


def test_a_failed_capture_is_the_last_one_and_the_graphs_before_it_serve(graphs, caplog):
    made = graphs({(4, False): RuntimeError("not permitted")})
    made.capture_all()
    assert made.tried == [(8, False), (8, True), (4, False)]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "2 of 8 CUDA graphs were captured" in warning and "RuntimeError: not permitted" in warning
    assert made.run(step(made, 1)) is not None and Graph.replays == [(8, False)]


def test_after_memory_has_moved_each_graph_is_captured_by_the_first_step_that_needs_it(graphs):
    made = graphs()
    made.capture_all()
    at_load = len(made.tried)
    made.void()
    for count, key in [
        (3, (4, False)),
        (4, (4, False)),
        (1, (1, False)),
        (3, (4, True)),
        (4, (4, True)),
        (8, (8, False)),
    ]:
        known = set(made.tried[at_load:])
        logits, _ = made.run(step(made, count, has_prefixes=key[1]))
        assert set(made.tried[at_load:]) - known == {key} - known
        assert logits[:, 0].tolist() == [index + 1 for index in range(count)]
        assert Graph.replays[-1] == key
    assert len(made.tried) == at_load + 4
    assert len({out.data_ptr() for out in made._model.outs[-4:]}) == 1, "graphs captured one by one share their logits"


def test_tokens_that_have_moved_cost_the_step_that_finds_it_one_capture(graphs):
    made = graphs()
    made.capture_all()
    at_load = len(made.tried)
    made._rows.last_tokens = made._rows.last_tokens.clone()
    for _ in range(2):
        assert made.run(step(made, 3)) is not None
        assert made.tried[at_load:] == [(4, False)]


def test_a_graph_without_room_after_a_sleep_is_not_tried_at_every_step(graphs, caplog):
    made = graphs()
    made.capture_all()
    made.void()
    made.problems |= {(4, False): NoRoomForGraph("3 MiB are free"), (2, False): NoRoomForGraph("2 MiB are free")}
    made.tried.clear()
    for count in (3, 2, 3):
        assert made.run(step(made, count)) is None
    assert made.run(step(made, 8)) is not None
    assert made.run(step(made, 3)) is not None and Graph.replays[-1] == (8, False), "a larger one serves"
    assert made.tried == [(4, False), (2, False), (8, False)]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "A CUDA graph was not captured" in warning and "for 4 sequences: 3 MiB are free" in warning
    made.void()
    made.problems.clear()
    assert made.run(step(made, 3)) is not None and Graph.replays[-1] == (4, False), (
        "after the next sleep it is tried again"
    )


def test_a_capture_that_fails_after_a_sleep_is_the_last_one_until_the_next(graphs):
    made = graphs()
    made.capture_all()
    made.void()
    made.problems[4, False] = RuntimeError("not permitted")
    made.tried.clear()
    assert made.run(step(made, 8)) is not None
    assert made.run(step(made, 3)) is not None and made.run(step(made, 1)) is not None
    assert made.tried == [(8, False), (4, False)] and set(Graph.replays) == {(8, False)}


def test_an_engine_without_memory_for_logits_runs_without_graphs(graphs, monkeypatch):
    made = graphs()

    def fail():
        raise torch.OutOfMemoryError("of 12 GiB")

    monkeypatch.setattr(made, "_logits_memory", fail)
    assert made.run(step(made, 1)) is None and made.tried == []


MIB = 1 << 20


class Device:
    """A device's memory as torch.cuda tells of it; graphs are captured by doing nothing."""

    def __init__(self, monkeypatch, num_free):
        self.num_free, self.allocated, self.peak, self.pools, self.trace = num_free, 0, 0, 0, []
        patches = {
            "synchronize": lambda: None,
            "empty_cache": lambda: self.trace.append("empty"),
            "mem_get_info": lambda: (self.num_free, 1 << 40),
            "memory_allocated": lambda: self.allocated,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", self.allocated),
            "graph_pool_handle": self.new_pool,
        }
        for name, function in patches.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(captured_graphs, "CudaGraph", lambda compute, pool: self.trace.append(("capture", pool)))

    def new_pool(self):
        self.pools += 1
        return self.pools

    def computes(self, num_bytes):
        """A computation that takes so much for a while."""
        return lambda: setattr(self, "peak", max(self.peak, self.allocated + num_bytes))


def test_a_capture_for_which_there_is_no_room_is_not_begun(monkeypatch):
    device = Device(monkeypatch, 300 * MIB)
    pool = GraphPool()
    with pytest.raises(NoRoomForGraph, match="300 MiB are free, and it may take 356"):
        pool.capture(device.computes(100 * MIB))
    assert device.trace == ["empty"], "room is counted after torch has returned what it keeps"
    pool.capture(device.computes(40 * MIB))
    device.num_free = 260 * MIB
    pool.capture(device.computes(39 * MIB))  # in the memory of the graph before it
    assert device.trace[-3:] == [("capture", 1), "empty", ("capture", 1)]
    GraphPool().capture(device.computes(0))
    assert device.trace[-1] == ("capture", 2)


def test_a_computation_that_runs_out_of_memory_is_not_captured(monkeypatch):
    device = Device(monkeypatch, 300 * MIB)

    def fail():
        raise torch.OutOfMemoryError("of 12 GiB")

    with pytest.raises(NoRoomForGraph, match="of 12 GiB"):
        GraphPool().capture(fail)
    assert device.trace == []


def test_after_a_failed_capture_all_graphs_are_captured_again_in_a_new_pool(device, monkeypatch):
    memory = Device(monkeypatch, 1 << 40)
    monkeypatch.setattr(decode_graphs, "draw_plainly", lambda *args: None)
    pools = []

    def capture(compute, pool):
        pools.append(pool)
        if len(pools) == 2:
            raise RuntimeError("not permitted")
        return Graph((8, False), compute)

    monkeypatch.setattr(captured_graphs, "CudaGraph", capture)
    made = DecodeGraphs(
        Model(device), SequenceRows(8, torch.device(device)), 8, vocab_size=VOCAB_SIZE, shares_prefixes=False
    )
    for _ in range(2):
        made.capture_all()
    assert pools == [1, 1, 2, 2, 2, 2], "the first pool may have leaked, and would poison what is captured in it"
    assert memory.pools == 2 and made.describe_count() == "4 of 4"
