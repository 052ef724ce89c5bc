"""Work of our host code on the fake device, each kind by itself; each function raises where a result is wrong."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import sync
from rollout_engine.base.messages import NewSequence, ScheduledSequence, UpdateOptions
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.cuda import decode_graphs
from rollout_engine.model.cuda.attention import CudaKVPool
from rollout_engine.model.cuda.copy_stream import CudaCopyStream
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs
from rollout_engine.model.cuda.decode_inputs import DecodeStep
from rollout_engine.model.cuda.draws import CudaDraws, Draws, DrawSettings, special_columns
from rollout_engine.model.cuda.edit_records import EditRecords
from rollout_engine.model.cuda.flat_columns import FlatColumns
from rollout_engine.model.cuda.pinned_upload import PinnedUpload
from rollout_engine.model.cuda.sampler import CudaSampler, to_output
from rollout_engine.model.cuda.sequence_rows import SequenceRows
from rollout_engine.model.cuda.shadow_memory import CudaShadowMemory
from rollout_engine.model.cuda.upload import Download, StaticColumns, upload
from rollout_engine.model.cuda.weight_memory import CudaWeightMemory
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.weights.copy_kernels import kernel_writer
from rollout_engine.weights.transaction import WeightUpdater
from rollout_engine.weights.update import update_from_source
from sync import nccl
from tests.fake_device.calls import CUDA
from tests.unit.weights.conftest import Steps

BUFFER = 64
"""Bytes of a pinned buffer for weights."""


def static_columns(fake):
    """Columns are sent faster than they are read."""
    static, totals = StaticColumns([(torch.float32, 8), (torch.int64, 8)], CUDA), []
    for value in range(1, 6):
        static.send([(np.full(value, value, np.float32), 8, 100), (np.arange(value), 8, -1)])
        totals.append(Download(static.columns[0].double() + static.columns[1]))
    for value, total in enumerate(totals, 1):
        assert total.wait().tolist() == [value + n for n in range(value)] + [99] * (8 - value)


def downloads(fake):
    """Results are on their way while their memory is written again."""
    x, made = torch.zeros(4, device=CUDA), []
    for value in range(1, 5):
        x.fill_(value)
        made.append(Download(x))
    assert [each.wait().tolist() for each in made] == [[value] * 4 for value in range(1, 5)]


def weights_from_the_host(fake):
    """A tensor of many buffers, contiguous and not; what a step has freed is written only after the step."""
    stream = CudaCopyStream(CUDA)
    send = PinnedUpload(stream, buffer_bytes=BUFFER)
    for number in range(2):
        temporary = torch.ones(100, device=CUDA) * 2
        kept = Download(temporary.sum())
        del temporary
        source = torch.randn(10, 10, generator=torch.Generator().manual_seed(number))
        fill, outs = _filling(source), []
        with stream.enter():
            for strided in (False, True):
                outs.append(torch.zeros(10, 10, device=CUDA))
                outs[-1] = outs[-1].t() if strided else outs[-1]
                send(outs[-1], fill)
        stream.lead_steps()
        for out in outs:
            assert torch.equal(Download(out).wait(), source)
        assert kept.wait().item() == 200


def _filling(source):
    """A function that writes the bytes of `source`, from some place on, into a piece of memory."""
    content = source.numpy().reshape(-1).view(np.uint8)
    return lambda piece, start: np.copyto(np.asarray(piece), content[start : start + len(piece)])


def copies_beside_steps(fake):
    """Memory for a copy, while a step that has freed its own is under way; the host fills the buffer anew."""
    stream = CudaCopyStream(CUDA)
    buffer, sums, outs, wait = stream.buffer(256), [], [], lambda: None
    for value in range(1, 5):
        sums.append(Download((torch.zeros(64, device=CUDA) + value).sum()))
        wait()
        buffer.numpy()[:] = value
        outs.append(stream.allocate(256))
        wait = stream.copy(outs[-1], buffer)
    wait()
    assert [each.wait().item() for each in sums] == [64 * value for value in range(1, 5)]
    assert [each.cpu().unique().tolist() for each in outs] == [[value] for value in range(1, 5)]


class _Model:
    """Live weights on the device, steps that read them, and an updater."""

    def __init__(self):
        self.qk = torch.zeros(3, 2, 8, device=CUDA)
        self.live = {"q": self.qk[:, 0], "k": self.qk[:, 1], "out": torch.zeros(8, 8, device=CUDA)}
        self.stream = CudaCopyStream(CUDA)
        writer = kernel_writer(CUDA, PinnedUpload(self.stream, buffer_bytes=BUFFER))
        memory = CudaShadowMemory(self.stream)
        self.updater = WeightUpdater.of(self.live, [], PackedWeights(nn.Module()), memory, writer=writer)
        self.launched = []

    def step(self):
        """Launch a step on the stream of steps, from wherever."""
        with torch.cuda.stream(torch.cuda.default_stream()):
            self.launched.append(Download(self.qk.sum() + self.live["out"].sum()))

    def update(self, weights, *, staging):
        """Update, with a step beside each tensor that arrives where steps may go on."""
        step = self.step if staging == "shadow" else lambda: None
        update_from_source(self.updater, weights, Steps(), UpdateOptions.from_values(staging=staging), check=step)

    def check(self, weights):
        """Steps found the old weights, all zeros, or the new ones, in this order."""
        self.step()
        found = [each.wait().item() for each in self.launched]
        total = sum(tensor.sum().item() for tensor in weights.values())
        assert found[:-1] == [0] * len(found[:-1]) and abs(found[-1] - total) < 1e-4
        for name, tensor in weights.items():
            assert torch.equal(self.live[name].cpu(), tensor.cpu())


def _weights(device="cpu"):
    g = torch.Generator().manual_seed(1)
    shapes = {"q": (3, 8), "k": (3, 8), "out": (8, 8)}
    return {name: torch.randn(shape, generator=g).to(device) for name, shape in shapes.items()}


def update_from_the_host(fake):
    """Into a shadow, beside steps."""
    model, weights = _Model(), _weights()
    model.step()
    model.update(weights, staging="shadow")
    model.check(weights)


def update_from_a_trainer(fake):
    """The trainer's tensors are on the device, computed a moment ago on the stream of steps."""
    model, weights = _Model(), _weights()
    on_device = {name: (tensor.pin_memory().to(CUDA, non_blocking=True) * 2) for name, tensor in weights.items()}
    model.updater.begin = mock.Mock(side_effect=_computed_now(model.updater.begin, on_device))
    model.update(on_device, staging="shadow")
    model.check({name: tensor * 2 for name, tensor in weights.items()})


def _computed_now(begin, tensors):
    """The trainer writes its tensors again, to the same values, just before the transfer starts."""

    def begin_and_compute(*args, **options):
        accepted = begin(*args, **options)
        for tensor in tensors.values():
            tensor.mul_(1.0)
        return accepted

    return begin_and_compute


def update_in_place(fake):
    """Straight into the live weights, which steps before it have read."""
    model, weights = _Model(), _weights()
    model.step()
    model.update(weights, staging="inplace")
    model.check(weights)


def a_shadow_is_freed(fake):
    """The shadow of an update is freed after its commit, and taken anew for the next one."""
    model, weights = _Model(), _weights()
    sender = sync.make_sender("inproc")
    model.updater.begin(sender.offer(weights, 1, model.updater.metadata()))
    model.updater.receive(sync.make_receiver("inproc", sender=sender))
    model.updater.verify()
    model.updater.commit()
    model.updater.release(forget=False)
    assert model.updater.make_room_for_shadow()
    model.check(weights)


def decode_graphs_replayed(fake):
    """Graphs over static memory, padded batches, and weights that leave the device and come back.

    After that a graph is captured again when a step needs it.
    """
    model = SimpleNamespace(module=nn.Linear(1, 1, device=CUDA), device=CUDA, weight=torch.ones(1).to(CUDA))
    model.kv = SimpleNamespace(block_size=4, states=SimpleNamespace(is_empty=True))
    model.attention = SimpleNamespace(plan=lambda batch: None)
    fill = lambda batch, pool, out: out.copy_((batch.positions * model.weight)[:, None].expand(out.shape))  # noqa: E731
    model.decoder = SimpleNamespace(vocab_size=10, write_logits=fill)
    with mock.patch.object(decode_graphs, "draw_plainly", lambda *args: None), torch.inference_mode():
        graphs = DecodeGraphs(model, SequenceRows(8, CUDA), 4, vocab_size=10, shares_prefixes=False)
        graphs.capture_all()
        memory = CudaWeightMemory([model.weight], SimpleNamespace(graphs=graphs))
        for counts, num_graphs in ((4, 3, 1), 3), ((3, 1, 2), 3), ((2,), 1):
            for count in counts:
                logits, _ = graphs.run(_decode_step(graphs, count))
                assert Download(logits[:, 0]).wait().tolist() == [1 + row for row in range(count)]
            assert graphs.describe_count() == f"{num_graphs} of 3"
            memory.release(forget=False)
            memory.take_back()


def _decode_step(graphs, count):
    """`count` sequences, sequence i at position i + 1, all drawn from."""
    rows, numbers = graphs._rows, list(range(count))
    rows.add(number for number in numbers if number not in rows.tables())
    known = {number: NewSequence(number, [5] * (number + 2), number + 2, SamplingParams(), 0) for number in numbers}
    scheduled = [ScheduledSequence(number, number + 1, 1, [number]) for number in numbers]
    changes = rows.learn(scheduled)
    flat = FlatColumns.of(scheduled, known, rows.rows(numbers), rows.matrix, 4)
    return DecodeStep(flat, None, None, changes)


def kv_blocks(fake):
    """Blocks are copied after a step has written them, and after their memory has been released."""
    layer = LayerGeometry(2, 1, 8, 16, scale=1.0, sliding_window=None, softcap=None, has_sinks=False)
    pool = CudaKVPool([layer] * 2, num_blocks=8, block_size=4, dtype=torch.float32, device=CUDA)
    for _ in range(2):
        for tensor in pool.tensors():
            tensor.copy_(torch.arange(8, device=CUDA)[:, None, None, None].expand(tensor.shape))
        pool.copy_blocks([(1, 5), (2, 1), (3, 2)])
        for tensor in pool.tensors():
            assert Download(tensor[:, 0, 0, 0]).wait().tolist() == [0, 2, 3, 3, 4, 1, 6, 7]
        pool.release()
        pool.memory.restore()


def draws(fake):
    """Plain draws and edited ones; the host reads results after the next draw has been launched."""
    params = [
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, presence_penalty=2.0, top_k=3, seed=2),
        SamplingParams(temperature=0.0, logit_bias={3: 100.0}),
    ]
    sampler, last_tokens = CudaSampler(20, CUDA), torch.zeros(8, dtype=torch.int64, device=CUDA)
    records, found = EditRecords(20, 10, CUDA), []
    for given in (params[:1], params):
        sequences = [NewSequence(row, [row, 3, 4], 2, each, seed=row) for row, each in enumerate(given)]
        edits = {row: each for row, s in enumerate(sequences) if (each := LogitEdits.of(s, (), 20)) is not None}
        chosen = DrawSettings.of(sequences, np.arange(len(given)))
        addresses = records.addresses(edits.values())
        columns = chosen.columns._replace(positions=np.full(len(given), 3))
        special = special_columns(chosen.batch, list(edits), addresses)
        drawn = Draws(sequences, chosen.batch, columns, special, {})
        arrived = CudaDraws.of(drawn, upload(drawn.sent, CUDA))
        logits = torch.arange(20.0, device=CUDA).expand(len(given), 20) * 1.0
        found.append((drawn, Download(sampler.draw(logits, arrived, last_tokens))))
    outs = [to_output(drawn, download.wait()) for drawn, download in found]
    assert outs[0].token_ids == outs[1].token_ids[:1] and outs[1].token_ids[2] == 3


def broadcast(fake):
    """nccl's ends: buckets arrive on a stream of their own, and are copied on that of copies."""
    model, weights = _Model(), _weights()
    with _nccl_group(fake) as ends:
        sender, receiver = ends
        source = {name: tensor.pin_memory().to(CUDA, non_blocking=True) for name, tensor in weights.items()}
        manifest = sender.offer(source, 1, model.updater.metadata())
        sender.send()
        model.updater.begin(manifest)
        model.updater.receive(receiver)
        model.updater.verify()
        model.updater.commit()
    model.check(weights)


class _Group:
    """A process group of NCCL: collectives run on a stream of its own, and `wait` has both host and stream wait."""

    def __init__(self, fake, rank, sent):
        self._fake, self._rank, self._sent, self._stream = fake, rank, sent, torch.cuda.Stream()

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._rank == 0:
                self._sent.append(tensor.clone())
            else:
                source = self._sent.pop(0)
                self._stream.wait_stream(self._sent_by)
                tensor.copy_(source)
        done = self._stream.record_event()
        return SimpleNamespace(wait=lambda timeout: (done.synchronize(), torch.cuda.current_stream().wait_event(done)))

    def allreduce(self, tensors, options):
        if options.reduceOp == dist.ReduceOp.MAX:  # rank 1 lacks all pieces
            tensors[0].fill_(1)
        return SimpleNamespace(wait=lambda timeout: None)


@contextmanager
def _nccl_group(fake):
    """(sender, receiver) whose ranks are joined; what rank 0 sends waits for rank 1."""
    sent, groups = [], []

    def group_of(config, connect):
        groups.append(_Group(fake, config.rank, sent))
        groups[-1]._sent_by = groups[0]._stream
        step = lambda: mock.MagicMock()  # noqa: E731
        return SimpleNamespace(
            config=config, wait_for_ranks=lambda: groups[config.rank], step=step, leave=lambda: None, ready=lambda: True
        )

    with mock.patch.multiple(nccl, WeightGroup=group_of, cuda_device=lambda *_: CUDA):
        options = {"rendezvous": "file:///nowhere", "world_size": 2, "bucket_bytes": 64}
        ends = sync.make_sender("nccl", **options), sync.make_receiver("nccl", rank=1, **options)
        yield ends
        for end in ends:
            end.close()


ALL = (
    *(static_columns, downloads, weights_from_the_host, copies_beside_steps, update_from_the_host),
    *(update_from_a_trainer, update_in_place, a_shadow_is_freed, decode_graphs_replayed, kv_blocks, draws, broadcast),
)
