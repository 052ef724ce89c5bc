"""The mirrored cache of pictures: both ends hold the same, within their bound, whatever is sent."""

import random

import numpy as np
import pytest

from rollout_engine.base.metrics import PictureStats
from rollout_engine.base.picture_cache import ENTRY_BYTES, PictureCache, ReceivedPictures, SentPictures
from rollout_engine.base.pictures import Picture, PlacedPicture

NUM_PICTURES = 10_000


def picture(number):
    """One of 8 to 800 bytes."""
    return Picture(number.to_bytes(16), {"pixel_values": np.full(1 + number % 100, number, np.int64)})


class Client:
    """Both ends of one client's cache."""

    def __init__(self, max_bytes):
        self.max_bytes, self.stats = max_bytes, PictureStats()
        self.sent, self.received = SentPictures(max_bytes), ReceivedPictures(max_bytes, self.stats)

    def request(self, numbers):
        placed = [PlacedPicture(i, i + 1, picture(number)) for i, number in enumerate(numbers)]
        stripped, missing = self.sent.strip(placed)
        assert not any(each.picture.arrays for each in stripped)
        for each in missing:
            self.received.add(each)
        restored = self.received.restore(stripped)
        assert [(each.start, each.end, each.picture.digest) for each in restored] == [
            (each.start, each.end, each.picture.digest) for each in placed
        ]
        for number, each in zip(numbers, restored, strict=True):
            assert each.picture.arrays["pixel_values"][0] == number
        self.check()
        return len(missing)

    def reset(self):
        self.sent.cache.clear()
        self.received.clear()

    def check(self):
        ours, theirs = self.sent.cache, self.received.cache
        assert ours.digests() == theirs.digests() and ours.num_bytes == theirs.num_bytes <= self.max_bytes
        assert self.received.num_arrived_bytes == 0


def test_both_ends_of_several_clients_stay_equal_under_10000_different_pictures():
    choose, clients = random.Random(53), [Client(max_bytes) for max_bytes in (0, 1_000, 50_000, 1 << 30)]
    for newest in range(NUM_PICTURES):
        client = choose.choice(clients)
        if choose.random() < 0.001:
            client.reset()
        client.request([*choose.choices(range(max(newest - 40, 0), newest + 1), k=choose.randint(0, 3)), newest])
    for client in clients:
        client.check()
        held = client.received.cache
        assert held.num_bytes == sum(held.use(digest).num_bytes + ENTRY_BYTES for digest in held.digests())
    assert clients[0].stats.num_hits == 0 and all(client.stats.num_hits > 1000 for client in clients[2:])
    assert len(clients[3].received.cache) > 1000


def test_the_arrays_of_a_picture_that_64_requests_share_cross_once():
    client = Client(1 << 20)
    assert [client.request([7]) for _ in range(64)] == [1] + [0] * 63
    assert client.request([7, 7, 8, 7, 8]) == 1
    assert (client.stats.num_received, client.stats.num_hits) == (2, 63 + 4)
    assert client.stats.num_received_bytes == picture(7).num_bytes + picture(8).num_bytes
    client.reset()
    assert client.request([7]) == 1


def test_those_used_last_are_held_and_one_above_the_bound_drops_no_other():
    cache, num_bytes = PictureCache(3 * ENTRY_BYTES + 10), {b"a": 4, b"b": 4, b"c": 2, b"d": 2_000, b"e": 5, b"f": 0}
    for name in (b"a", b"b", b"c"):
        cache.add(name, num_bytes[name], name)
    assert cache.use(b"a") == b"a"
    cache.add(b"d", num_bytes[b"d"], b"d")
    assert cache.digests() == [b"b", b"c", b"a"] and cache.use(b"d") is None
    cache.add(b"e", num_bytes[b"e"], b"e")
    assert cache.digests() == [b"a", b"e"] and cache.num_bytes == 2 * ENTRY_BYTES + 9
    cache.add(b"f", num_bytes[b"f"], b"f")
    cache.add(b"c", num_bytes[b"c"], b"c")
    assert cache.digests() == [b"e", b"f", b"c"], "one without bytes takes room, too"


def test_a_digest_whose_picture_has_not_arrived_is_refused():
    received = ReceivedPictures(1 << 20)
    received.add(picture(3))
    with pytest.raises(LookupError, match=f"digest {(4).to_bytes(16).hex()} has not arrived"):
        received.restore([PlacedPicture(0, 1, picture(4))])
