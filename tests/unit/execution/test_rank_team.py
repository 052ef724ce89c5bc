"""What rank 0 makes of the answers of another rank."""

import socket

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError
from rollout_engine.base.messages import NewSequence, SchedulerOutput
from rollout_engine.base.picture_cache import ReceivedPictures
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.threads import start_thread
from rollout_engine.children.channel import Channel
from rollout_engine.execution import rank_main
from rollout_engine.execution.rank_launcher import Rank
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_values import unpack_value
from rollout_engine.execution.rank_wire import ForgetPictures, Joined, Step, StepMessage, TakePicture


class Exchange:
    rank, num_ranks = 0, 2

    def break_(self):
        self.is_broken = True


class FakeRank(Rank):
    name = "rank 1"

    def how_it_ended(self):
        return "with status 0"

    def _end_process(self):
        pass


class Launcher:
    """Rank 1 is a thread of this process, which answers calls by their slot."""

    is_remote, place = False, None

    def start(self, settings):
        pairs = [tuple(map(Channel, socket.socketpair())) for _ in range(4)]
        self.calls = pairs[2][1]
        self.theirs = [pair[1] for pair in pairs]
        start_thread(self._serve, name="rank 1")
        yield FakeRank(settings[0], *(pair[0] for pair in pairs))

    def carry_out(self, method, arguments):
        return msgspec.msgpack.decode(arguments)["slot"]

    def _serve(self):
        try:
            while True:
                rank_main._answer(self, self.calls)
        except (EOFError, OSError):
            pass

    def close(self):
        for channel in self.theirs:
            channel.close()


@pytest.fixture
def launcher():
    return Launcher()


@pytest.fixture
def team(launcher):
    threads = torch.get_num_threads()
    team = RankTeam(EngineConfig(model="m", num_threads=threads), launcher, Exchange(), Joined({}, ""))
    yield team
    team.shutdown()
    assert torch.get_num_threads() == threads


def test_each_call_gets_its_own_answer(team):
    assert [team.ask("remove_adapter", slot=slot) for slot in range(3)] == [[None, slot] for slot in range(3)]


def test_an_answer_to_another_call_ends_the_team(team, monkeypatch):
    def interrupted(self, rank):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RankTeam, "_answer", interrupted)
        team.ask("remove_adapter", slot=5)
    with pytest.raises(EngineDeadError, match="rank 1 answered call 1 when call 2 was made"):
        team.ask("remove_adapter", slot=6)
    assert isinstance(team.error, EngineDeadError) and team.exchange.is_broken


PICTURE = Picture.of(
    {"pixel_values": np.arange(200_000, dtype=np.float32).reshape(100, -1), "grid": np.array([[1, 2]])}
)


def step_with_pictures(*sequence_ids):
    placed = [PlacedPicture(1, 3, PICTURE)]
    new = [NewSequence(each, [5, 9, 9], 3, SamplingParams(), seed=7, pictures=placed) for each in sequence_ids]
    return SchedulerOutput(0, 0, [], new, [], [], [])


def test_the_arrays_of_a_picture_cross_to_a_rank_once_for_all_samples_until_they_are_forgotten(team, launcher):
    steps, kept = launcher.theirs[1], ReceivedPictures(EngineConfig(model="m").mm_cache_bytes)
    found = []

    def send():
        team.step(step_with_pictures(1, 2), np.zeros(3, np.int64))
        team.step(step_with_pictures(3), np.zeros(3, np.int64))
        team.forget_pictures()
        team.step(step_with_pictures(4), np.zeros(3, np.int64))

    start_thread(send, name="rank 0")
    for _ in range(6):
        message = steps.receive(StepMessage, timeout=60)
        found.append(type(message))
        match message:
            case TakePicture(digest, arrays):
                assert digest == PICTURE.digest
                kept.add(Picture(digest, unpack_value(arrays)))
            case ForgetPictures():
                kept.clear()
            case Step(work):
                for new in work.new:
                    assert new.pictures[0].picture.arrays == {} and new.seed == 0
                    [placed] = kept.restore(new.pictures)
                    assert (placed.start, placed.end, Picture.of(placed.picture.arrays).digest) == (1, 3, digest)
                    assert all(array.flags.writeable for array in placed.picture.arrays.values())
    assert found == [TakePicture, Step, Step, ForgetPictures, TakePicture, Step]
