"""What rank 0 makes of the answers of another rank."""

import socket

import msgspec
import pytest
import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError
from rollout_engine.base.threads import start_thread
from rollout_engine.children.channel import Channel
from rollout_engine.execution import rank_main
from rollout_engine.execution.rank_launcher import Rank
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_wire import Joined


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

    is_remote = False

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
def team():
    threads = torch.get_num_threads()
    team = RankTeam(EngineConfig(model="m", num_threads=threads), Launcher(), Exchange(), Joined({}, ""))
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
