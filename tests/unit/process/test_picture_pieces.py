"""Pictures on the way from clients to a core: once, in pieces, and nothing else is one."""

import random
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.metrics import PictureStats
from rollout_engine.base.picture_cache import SentPictures
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.children.failure import WireError
from rollout_engine.process import picture_pieces, wire
from rollout_engine.process.client_outbox import ClientOutbox
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_clock import SharedClock
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.keys import Keys
from rollout_engine.process.parts import Assembler
from rollout_engine.process.picture_pieces import PictureIntake
from rollout_engine.process.process_client import ProcessClient
from rollout_engine.process.request_columns import with_columns
from rollout_engine.process.wire import AddRequest, ArrayForm, Decoder, ForgetPictures, Limits, PicturePiece, Refused
from tests.faults.peers import READY, RawClient

KEYS = Keys.make()


def picture(number, num_rows=3):
    return Picture.of({"pixel_values": np.full((num_rows, 7), number, np.float32), "grid": np.array([[1, number]])})


EVERY_KIND = Picture.of(
    {
        "none": np.empty((0, 5), np.float32),
        "number": np.array(3.5),
        "mask": np.arange(40).reshape(2, 20) % 3 == 0,
        "long": np.arange(700_000, dtype=np.float32).reshape(7, -1),
        "turned": np.arange(600, dtype=np.int32).reshape(20, 30).T,
        "half": np.arange(9, dtype=np.float16),
        "bytes": np.arange(200, dtype=np.uint8),
    }
)


def request(*pictures, first=0):
    return EngineCoreRequest(
        prompt_token_ids=[5] * max(len(pictures), 1),
        params=SamplingParams(),
        max_tokens=5,
        seed=1,
        first_sequence_id=first,
        pictures=[PlacedPicture(i, i + 1, each) for i, each in enumerate(pictures)],
    )


class Pair:
    """A client's outbox and the core's end, with the frames between them."""

    def __init__(self, max_bytes=1 << 20, limits=None):
        self.stats, self.asked, self.limits = PictureStats(), [], limits or Limits()
        self.intake = PictureIntake(self.stats, self.asked.append)
        self.intake.add_client(0, max_bytes)
        self.outbox = ClientOutbox(Limits(), SharedClock())
        self.outbox.pictures = SentPictures(max_bytes)
        self._assembler = Assembler(Decoder(wire.ToCore), Limits())
        self.num_pieces = 0
        self._arrived = []

    def send(self, multiparts):
        for frames in multiparts:
            message = self._assembler.read([bytes(frame) for frame in frames])
            self.num_pieces += isinstance(message, PicturePiece)
            if message is not None and (message := self.intake.read(0, message)) is not None:
                self._arrived.append(message)

    def cross(self, *messages):
        """What the busy loop gets of messages, and the answers of the client itself."""
        for message in messages:
            self.outbox.append(with_columns(message) if isinstance(message, EngineCoreRequest) else message)
        answers, arrived = self.outbox.send(self, self.limits), self._arrived
        self._arrived = []
        held = self.intake._clients[0].received
        if not self.asked:
            assert held.cache.digests() == self.outbox.pictures.cache.digests() and not held.num_arrived_bytes
        return arrived, answers


def same_pictures(message, *pictures):
    found = [each.picture for each in message.request.pictures]
    assert [each.digest for each in found] == [each.digest for each in pictures]
    for mine, theirs in zip(found, pictures, strict=True):
        assert mine.arrays.keys() == theirs.arrays.keys()
        for name, array in mine.arrays.items():
            expected = theirs.arrays[name]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
            assert array.tobytes() == expected.tobytes() and array.flags.writeable and array.flags.c_contiguous


def test_arrays_of_every_kind_arrive_as_they_were():
    pair = Pair(max_bytes=1 << 30)
    [message], answers = pair.cross(request(EVERY_KIND, picture(1), EVERY_KIND))
    same_pictures(message, EVERY_KIND, picture(1), EVERY_KIND)
    assert not answers and (pair.stats.num_received, pair.stats.num_hits) == (2, 1)
    assert pair.stats.num_received_bytes == EVERY_KIND.num_bytes + picture(1).num_bytes
    assert pair.num_pieces > 8
    [message], _ = pair.cross(request(picture(1), EVERY_KIND))
    same_pictures(message, picture(1), EVERY_KIND)
    assert pair.stats.num_received == 2


def test_a_request_without_pictures_is_one_message():
    pair = Pair()
    [message], _ = pair.cross(request())
    assert message.request.pictures == [] and pair.num_pieces == 0


@pytest.mark.parametrize("max_bytes", [0, 5_000, 1 << 20])
def test_many_pictures_with_resets_and_refusals_leave_both_ends_equal(monkeypatch, max_bytes):
    monkeypatch.setattr(picture_pieces, "MAX_PICTURE_BYTES", 5_000)
    choose, pair = random.Random(max_bytes), Pair(max_bytes)
    for newest in range(400):
        numbers = choose.choices(range(max(newest - 9, 0), newest + 1), k=choose.randint(1, 4))
        pictures = [picture(number, 1 + number % 20) for number in numbers]
        refuses = choose.random() < 0.05
        if refuses:
            pictures.append(picture(newest, 300))
        if choose.random() < 0.05:
            pair.cross(ForgetPictures())
        arrived, answers = pair.cross(request(*pictures, first=newest))
        assert (len(arrived), len(answers)) == (not refuses, refuses)
        if arrived:
            same_pictures(arrived[0], *pictures)
        assert pair.intake._clients[0].received.cache.num_bytes <= max_bytes
    assert pair.asked == [] and bool(pair.stats.num_hits) == bool(max_bytes)


@pytest.mark.parametrize(
    "found, said",
    [
        (picture(1, 300), "a picture takes 8416 bytes, and may take 5000; give a smaller one, or set the most pixels"),
        (Picture(bytes(16), {"pixels": np.zeros(3, complex)}), "pixels of a picture is complex128; known: |b1"),
    ],
)
def test_a_picture_that_cannot_be_sent_is_refused_alone(monkeypatch, found, said):
    monkeypatch.setattr(picture_pieces, "MAX_PICTURE_BYTES", 5_000)
    pair = Pair()
    arrived, [refusal] = pair.cross(request(picture(2), found, first=7), request(picture(2), first=8))
    assert isinstance(refusal, Refused) and refusal.first_sequence_id == 7 and said in refusal.failure.message
    same_pictures(arrived[0], picture(2))


def test_pictures_of_one_request_have_a_bound_together(monkeypatch):
    monkeypatch.setattr(picture_pieces, "MAX_REQUEST_BYTES", 1_000)
    pair = Pair()
    _, [refusal] = pair.cross(request(*(picture(number, 20) for number in range(3))))
    assert "its pictures take 1728 bytes, and may take 1000; give fewer" in refusal.failure.message


def first_piece(*forms):
    return PicturePiece(np.empty(0, np.uint8), [ArrayForm(*form) for form in forms])


def data(num_bytes, fill=0):
    return PicturePiece(np.full(num_bytes, fill, np.uint8))


@pytest.mark.parametrize(
    "pieces",
    [
        [data(4)],
        [first_piece(("a", "<c8", [1]))],
        [first_piece(("a", "<f4", [-1]))],
        [first_piece(("a", "<f4", [1] * 9))],
        [first_piece(("a", "<f4", [2**62, 4]))],
        [first_piece(("a", "<f4", [0, 2**62, 4]))],
        [first_piece(("a", "<f4", [1]), ("a", "<f4", [1]))],
        [first_piece(*((str(i), "|u1", [0]) for i in range(65)))],
        [first_piece(("a", "<f4", [2])), data(9)],
        [first_piece(("a", "<f4", [2]), ("b", "<f4", [2])), data(4), data(8)],
        [first_piece(("a", "<f4", [2])), data(4), PicturePiece(np.zeros(1, np.int32))],
        [first_piece(("a", "<f4", [2])), data(4), PicturePiece(np.zeros((1, 1), np.uint8))],
        [first_piece(("a", "|b1", [2])), data(2, fill=2)],
        [first_piece(("a", "<f4", [2])), data(8), data(1)],
        [first_piece(("a", "|u1", [700_000_000])), first_piece(("a", "|u1", [(1 << 30) + 1]))],
    ],
)
def test_pieces_of_no_picture_are_refused_and_leave_nothing(pieces):
    pair = Pair()
    *before, last = pieces
    for piece in before:
        assert pair.intake.read(0, piece) is None
    with pytest.raises(WireError):
        pair.intake.read(0, last)
    [message], _ = pair.cross(ForgetPictures(), request(picture(1)))
    same_pictures(message, picture(1))


def test_pictures_without_bytes_that_no_request_has_are_bounded():
    pair, empty = Pair(), first_piece(("a", "|u1", [0]))
    for _ in range(4096):
        pair.intake.read(0, empty)
    with pytest.raises(WireError, match="4096 pictures have arrived"):
        pair.intake.read(0, empty)


def test_a_client_cannot_give_a_picture_the_digest_of_another():
    pair, mine = Pair(), picture(1)
    lie = AddRequest(request(Picture(picture(2).digest, mine.arrays)))
    arrived, _ = pair.cross(lie)
    assert arrived[0].request.pictures[0].picture.arrays == {}  # as it came: the core refuses it
    assert pair.asked == [0]


@pytest.fixture
def core(tmp_path):
    parent, child = socket.socketpair()
    with parent, child:
        options = dict(heartbeat_seconds=60.0, max_backlog_bytes=1 << 20, listen="tcp://127.0.0.1:0", keys=KEYS)
        io = CoreSocket(str(tmp_path), child, **options)
        io.directory = str(tmp_path)
        io.start(lambda: READY, on_orphaned=lambda: None)
        yield io
        io.close("the test is over")


@pytest.fixture(params=["directory", "tcp"])
def client(request, core):
    place = (core.directory, None) if request.param == "directory" else (core.address, KEYS)
    client = ProcessClient(ClientSocket.connect(place[0], keys=place[1], hang_seconds=60))
    client.listen(SimpleNamespace(fail_all=lambda _: None))
    yield client
    client.shutdown()


def next_request(core):
    return core.inbox.get(timeout=60).message


def test_64_requests_of_one_picture_send_its_arrays_once(core, client):
    for first in range(64):
        client.add_request(request(EVERY_KIND, first=first))
    arrived = [next_request(core) for _ in range(64)]
    assert [each.request.first_sequence_id for each in arrived] == list(range(64))
    same_pictures(arrived[0], EVERY_KIND)
    assert len({id(each.request.pictures[0].picture) for each in arrived}) == 1, "they share its arrays"
    stats = core.picture_stats
    assert (stats.num_received, stats.num_received_bytes, stats.num_hits) == (1, EVERY_KIND.num_bytes, 63)


def test_clients_have_caches_of_their_own_and_a_reset_reaches_all_of_them(core, client):
    other = ProcessClient(ClientSocket.connect(core.directory, hang_seconds=60))
    other.listen(SimpleNamespace(fail_all=lambda _: None))
    for each in (client, other, client, other):
        each.add_request(request(picture(1)))
        same_pictures(next_request(core), picture(1))
    assert (core.picture_stats.num_received, core.picture_stats.num_hits) == (2, 2)
    core.send_all(ForgetPictures())
    for each in (client, other):
        kept, deadline = each._socket._outbox.pictures.cache, time.monotonic() + 60
        while kept.digests():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        each.add_request(request(picture(1)))
        same_pictures(next_request(core), picture(1))
    assert (core.picture_stats.num_received, core.picture_stats.num_hits) == (4, 2)
    other.shutdown()


def test_a_picture_that_never_came_leaves_its_client_the_others(core):
    client = RawClient(core.directory)
    client.say(AddRequest(request(Picture(picture(1).digest, {}))))
    assert next_request(core).request.pictures[0].picture.arrays == {}
    assert client.hear() == ForgetPictures()
    client.say(data(3))
    assert "a piece of a picture that has not begun" in client.hear().reason
    client.close()
