"""Ranks that share no memory, as on several machines: the same bits over TCP, and an end that is noticed.

They run on this machine, and know nothing of one another but what came by their sockets.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.children.process import environment_with_package, start_module
from rollout_engine.execution import process_executor, rank_launcher, remote_ranks
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_wire import Joined
from rollout_engine.execution.remote_ranks import TOKEN_VARIABLE, RemoteLauncher, arguments_of
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import tiny_checkpoint
from tests.integration.test_ranks import PROMPTS, SAMPLED, all_of, running, started, with_updates

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")


class Child:
    """A rank's process, started as another machine would start it."""

    def __init__(self, arguments, variables):
        environment = environment_with_package() | variables
        self.process = start_module(rank_launcher.MODULE, arguments, descriptors=(), environment=environment)
        self.name = f"process {self.process.pid} elsewhere"

    def has_ended(self):
        return self.process.poll() is not None

    def how_it_ended(self):
        return f"with status {self.process.wait(30)}"

    def end(self):
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Elsewhere(RemoteLauncher):
    """Starts each rank without any descriptor of this process."""

    made = []

    def __init__(self, num_ranks, spoil=lambda place: place):
        super().__init__("127.0.0.1", num_ranks)
        self.children, self._spoil = [], spoil
        self.made.append(self)

    def begin(self, settings, place):
        variables = {TOKEN_VARIABLE: place.token, "OMP_NUM_THREADS": "1"}
        arguments = arguments_of(self._spoil(place), settings.rank, self.meeting.num_ranks)
        self.children.append(Child(arguments, variables))
        return self.children[-1]


@pytest.fixture
def elsewhere(monkeypatch):
    """Engines of this test have their ranks elsewhere. Returns the launchers made."""
    monkeypatch.setattr(Elsewhere, "made", [])
    monkeypatch.setattr(process_executor, "_launcher_of", lambda config, _: Elsewhere(config.tensor_parallel_size))
    yield Elsewhere.made
    for launcher in Elsewhere.made:
        assert all(child.process.returncode is not None for child in launcher.children)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.slow
def test_ranks_elsewhere_give_the_bits_of_one_process(elsewhere, checkpoint):
    with running(checkpoint, 2) as two, running(checkpoint, 1) as one:
        assert all_of(two, "qwen3") == all_of(one, "qwen3")
        assert with_updates(two.llm_engine) == with_updates(one.llm_engine)
        assert len(two.collective_rpc("get_weight_digest")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "num_ranks", "options"), [
    ("mixtral", 2, {}),
    ("qwen3_moe", 4, {}),
    ("llama", 4, dict(dtype="bfloat16")),
    ("olmoe", 2, {}),
    ("gemma2", 2, {}),
])  # fmt: skip
def test_more_models_have_the_bits_of_one_process(elsewhere, tmp_path, architecture, num_ranks, options):
    fields = dict(num_attention_heads=4, num_key_value_heads=4)
    path = tiny_checkpoint(tmp_path, architecture, **fields)
    with running(path, num_ranks, **options) as cut, running(path, 1, **options) as one:
        assert all_of(cut, architecture, **fields) == all_of(one, architecture, **fields)


@pytest.mark.slow
def test_ranks_elsewhere_save_their_parts_for_ranks_here(elsewhere, monkeypatch, checkpoint, tmp_path):
    with running(checkpoint, 2) as engine:
        engine.save_sharded_state(str(tmp_path / "parts"))
        expected = engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    monkeypatch.undo()
    with running(tmp_path / "parts", 2, load_format="sharded") as engine:
        found = engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    samples = [
        [(list(c.token_ids), c.logprobs.tobytes()) for r in results for c in r.outputs] for results in (found, expected)
    ]
    assert samples[0] == samples[1]


@pytest.mark.slow
@pytest.mark.parametrize("when", [pytest.param("idle", marks=pytest.mark.slow), "in a step"])
def test_a_rank_that_ends_ends_the_engine_and_is_named(elsewhere, checkpoint, when):
    engine = started(checkpoint, 2)
    try:
        (child,) = elsewhere[0].children
        if when == "in a step":
            for index, prompt in enumerate(PROMPTS):
                engine.llm_engine.add_request(str(index), prompt, SAMPLED)
            engine.llm_engine.step()
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank 1 \({child.name}\) has ended with status -9"):
            while True:
                engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    finally:
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_rank_that_is_stopped_ends_the_engine_and_goes_with_it(request, checkpoint, place):
    if place == "elsewhere":
        request.getfixturevalue("elsewhere")
    before = psutil.Process().children()
    engine = started(checkpoint, 2)
    try:
        (rank,) = [child for child in psutil.Process().children() if child not in before]
        rank.suspend()
        with pytest.raises(EngineDeadError, match=r"rank 1 .*has given no sign of life for 4\.5 s"):
            engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    finally:
        engine.shutdown()
    assert not rank.is_running()


@pytest.mark.slow
def test_ranks_elsewhere_end_when_rank_0_does(checkpoint, tmp_path):
    program = f"""
import time
from tests.integration.test_remote_ranks import Elsewhere, process_executor, started
process_executor._launcher_of = lambda config, _: Elsewhere(config.tensor_parallel_size)
engine = started({str(checkpoint)!r}, 2)
print(Elsewhere.made[0].children[0].process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as rank_0:
        child = psutil.Process(int(rank_0.stdout.readline()))
        rank_0.kill()
    gone, alive = psutil.wait_procs([child], 10)
    assert gone and not alive


@pytest.mark.slow
def test_a_stranger_is_not_let_in(elsewhere, monkeypatch, checkpoint):
    """Connections with another token, with too little, and with none do not keep the ranks from coming."""
    begin, strangers = Elsewhere.begin, []

    def beset(self, settings, place):
        for content in (b"x" * remote_ranks._HELLO.size, b"GET / HTTP/1.1\r\n\r\n", b""):
            strangers.append(socket.create_connection((place.host, place.port)))
            strangers[-1].sendall(content)
        return begin(self, settings, place)

    monkeypatch.setattr(Elsewhere, "begin", beset)
    with running(checkpoint, 2) as engine:
        assert len(engine.generate(PROMPTS, SAMPLED, use_tqdm=False)) == len(PROMPTS)
    for stranger in strangers:
        with stranger:
            stranger.settimeout(5)
            assert stranger.recv(1) == b""  # closed, nothing sent


@pytest.mark.slow
def test_a_rank_that_cannot_connect_is_named(elsewhere, monkeypatch, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as other:
        nowhere = other.getsockname()[1]
    spoil = lambda place: place._replace(port=nowhere)  # noqa: E731
    monkeypatch.setattr(process_executor, "_launcher_of", lambda config, _: Elsewhere(2, spoil))
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+ elsewhere\) has ended with status 1, unconnected"):
        started(checkpoint, 2)


@pytest.mark.slow
def test_ranks_that_compute_otherwise_are_refused(elsewhere, monkeypatch, checkpoint):
    """A rank of another torch, or another CPU, would give other bits."""
    own = Joined.of(torch.device("cpu"))
    other = Joined(own.arithmetic | {"torch": "1.0"}, "")
    monkeypatch.setattr(Joined, "of", lambda device: other)
    found = rf"rank 1 .*torch 1\.0 here, torch {re.escape(own.arithmetic['torch'])} there"
    with pytest.raises(ConfigError, match=found):
        started(checkpoint, 2)


@pytest.mark.parametrize(("facts", "devices", "match"), [
    ({"instruction set avx512_f": "yes"}, "AB", r"rank 1 does not .*instruction set avx512_f no here, .* yes there"),
    ({}, "AA", r"rank 1 and rank 0 have the same GPU \(A\)"),
    ({}, "AB", None),
    ({}, ("", ""), None),
])  # fmt: skip
def test_ranks_that_do_not_fit_are_refused(facts, devices, match):
    team, failures = object.__new__(RankTeam), []
    arithmetic = {"torch": "2.13.0", "instruction set avx512_f": "no"}
    team._joined, team._changing, team.fail = (
        {"rank 0": Joined(arithmetic, devices[0])},
        threading.Lock(),
        failures.append,
    )
    team._require_fit("rank 1", Joined(arithmetic | facts, devices[1]))
    assert len(failures) == (match is not None) and all(re.search(match, str(each)) for each in failures)


@pytest.mark.slow
def test_a_rank_that_hangs_before_it_connects_is_named(elsewhere, monkeypatch, checkpoint):
    monkeypatch.setattr(remote_ranks, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(Child, "__init__", hanging)
    with pytest.raises(ConfigError, match=re.escape("rank 1 (nobody) has not connected to 127.0.0.1:")):
        started(checkpoint, 2)


def hanging(self, arguments, variables):
    self.process, self.name = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]), "nobody"
    self.end = lambda: (self.process.kill(), self.process.wait())


@pytest.mark.slow
def test_a_rank_that_falls_silent_keeps_nobody_waiting_once_it_counts_as_lost(elsewhere, checkpoint):
    engine = started(checkpoint, 2)
    (child,) = elsewhere[0].children
    os.kill(child.process.pid, signal.SIGSTOP)
    found = []

    def generate():
        with pytest.raises(EngineDeadError, match="rank 1 is lost"):
            engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
        found.append(True)

    waiting = threading.Thread(target=generate, daemon=True)
    waiting.start()
    time.sleep(0.5)
    assert waiting.is_alive()
    engine.llm_engine.frontend.client.driver.executor._team.fail(EngineDeadError("rank 1 is lost"))
    waiting.join(20)
    assert found
    engine.shutdown()
