"""Over gloo only the pieces travel that a rank lacks; each rank takes its own."""

import contextlib
import threading

import pytest
import torch

import sync
from sync.broadcast import BroadcastEnd
from sync.digests import PIECE_BYTES
from sync.pieces import Part, num_bytes_lacking, piece_flags, select_flagged

NUM_PIECES = 5
PER_PIECE = PIECE_BYTES // 4
OLD = {
    "large": torch.randn(NUM_PIECES * PER_PIECE - 7),
    "other": torch.randn(2 * PER_PIECE),
    "small": torch.randn(30),
    "empty": torch.empty(0),
}
LARGE, OTHER, SMALL, EMPTY = OLD


class Rank:
    """A receiver with a shadow that holds the old values."""

    def __init__(self, receiver, lacking):
        self.receiver, self.lacking = receiver, lacking
        self.shadow = {name: tensor.clone() for name, tensor in OLD.items()}

    def receive(self, manifest):
        specs = {spec.name: spec for spec in manifest.tensors}
        lacking = self.lacking and {
            name: None if indices is None else Part(specs[name], indices) for name, indices in self.lacking.items()
        }
        self.results = self.receiver.receive_into(self.shadow, manifest, lacking=lacking)


@pytest.fixture
def bytes_sent(monkeypatch):
    """The size of every bucket that the sender has broadcast."""
    sizes, broadcast = [], BroadcastEnd.broadcast

    def counted(end, tensor):
        if tensor.dtype == torch.uint8 and end.group.config.rank == 0:
            sizes.append(tensor.numel())
        return broadcast(end, tensor)

    monkeypatch.setattr(BroadcastEnd, "broadcast", counted)
    return sizes


@pytest.fixture
def push(tmp_path):
    """A function: push a source to ranks that lack these pieces of these tensors, and return the ranks."""
    with contextlib.ExitStack() as stack:

        def run(source, *lacking, metadata=None, before_send=lambda: None):
            place = {"rendezvous": f"file://{tmp_path}/r", "world_size": 1 + len(lacking), "timeout": 60.0}
            sender = sync.make_sender("gloo", **place)
            ends = [sync.make_receiver("gloo", rank=i, **place) for i in range(1, 1 + len(lacking))]
            for end in (sender, *ends):
                stack.callback(end.close)
            ranks = list(map(Rank, ends, lacking))
            manifest = sender.offer(source, 1, metadata or {})
            before_send()
            threads = [threading.Thread(target=rank.receive, args=[manifest]) for rank in ranks]
            for thread in threads:
                thread.start()
            sender.send()
            for thread in threads:
                thread.join(60)
            return manifest, ranks

        yield run


def changed(*places):
    """The old values, with one element changed in each of these pieces (name, index)."""
    new = {name: tensor.clone() for name, tensor in OLD.items()}
    for name, i in places:
        new[name][i * PER_PIECE] += 1
    return new


def arrived(manifest, ranks, source):
    digests = {spec.name: spec.digest for spec in manifest.tensors}
    for rank in ranks:
        assert all(torch.equal(rank.shadow[name], source[name]) for name in OLD)
        assert all(result.finite and result.digest == digests[name] for name, result in rank.results.items())
        assert rank.lacking is None or rank.results.keys() == rank.lacking.keys()
    return True


def test_pieces_that_a_rank_lacks_travel_and_no_others(push, bytes_sent):
    source = changed((LARGE, 1), (LARGE, 3), (SMALL, 0))
    assert arrived(*push(source, {LARGE: [1, 3], SMALL: None}), source)
    assert 2 * PIECE_BYTES <= sum(bytes_sent) <= 2 * PIECE_BYTES + 256


def test_each_rank_takes_what_it_lacks_of_what_any_rank_lacks(push, bytes_sent):
    source = changed((LARGE, 0), (LARGE, NUM_PIECES - 1), (OTHER, 1))
    manifest, ranks = push(source, {LARGE: [0, NUM_PIECES - 1], OTHER: [1]}, {LARGE: [0], OTHER: [1]})
    ranks[1].shadow[LARGE][(NUM_PIECES - 1) * PER_PIECE] += 1  # it had that piece already
    assert arrived(manifest, ranks, source)
    assert sum(bytes_sent) == 3 * PIECE_BYTES  # with 28 bytes between the two tensors


def test_a_rank_that_lacks_everything_gets_it_beside_one_that_lacks_a_piece(push, bytes_sent):
    source = changed((LARGE, 2))
    assert arrived(*push(source, None, {LARGE: [2]}), source)
    assert sum(bytes_sent) >= sum(tensor.nbytes for tensor in OLD.values())


def test_nothing_travels_to_ranks_that_lack_nothing(push, bytes_sent):
    manifest, (rank,) = push(OLD, {})
    assert rank.results == {} and bytes_sent == []


def test_pieces_are_cast_on_the_way(push, bytes_sent):
    source = {name: tensor.double() for name, tensor in changed((LARGE, 4)).items()}
    metadata = {name: ("float32", tuple(tensor.shape)) for name, tensor in OLD.items()}
    assert arrived(*push(source, {LARGE: [4]}, metadata=metadata), source | changed((LARGE, 4)))
    assert sum(bytes_sent) == PIECE_BYTES - 7 * 4


def test_a_piece_that_changes_after_the_offer_has_another_digest(push):
    source = changed((LARGE, 1), (OTHER, 0))
    lacking = {LARGE: [1], OTHER: [0]}
    manifest, (rank,) = push(source, lacking, before_send=lambda: source[LARGE][PER_PIECE].add_(1))
    digests = {spec.name: spec.digest for spec in manifest.tensors}
    assert {name for name in lacking if rank.results[name].digest != digests[name]} == {LARGE}


def test_flags_say_what_is_lacking():
    specs = sync.make_sender("inproc").offer(OLD, 1, {}).tensors
    for lacking in ({}, {SMALL: None, EMPTY: None}, {LARGE: Part(specs[0], [0, 4]), OTHER: None}):
        assert select_flagged(piece_flags(lacking, specs), specs) == lacking
    everything = select_flagged(piece_flags(None, specs), specs)
    assert everything == dict.fromkeys(OLD)
    assert num_bytes_lacking(everything, {spec.name: spec for spec in specs}) == sum(t.nbytes for t in OLD.values())
