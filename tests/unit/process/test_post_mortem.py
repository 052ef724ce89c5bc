"""Post-mortem files: what a core remembers, written, read, printed and replayed."""

import gc
import random
import subprocess
import sys
import weakref

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import Picture, PictureInfo, PlacedPicture
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.cli.main import main
from rollout_engine.cli.schedule_replay import replay
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.core.fake_tier import FakeStore, num_slot_bytes
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.core.tier import Tier
from rollout_engine.engine.history import History
from rollout_engine.process import post_mortem
from rollout_engine.process.post_mortem import AddLine, CallLine, EndLine, LiveLine, StepLine

VOCAB_SIZE = 1_000_003
"""So many that two samples hardly ever share a token by chance: a replay draws others."""
STOP = 3
CONFIG = CoreConfig(
    num_blocks=48,
    block_size=4,
    max_model_len=96,
    max_num_seqs=6,
    max_num_batched_tokens=24,
    vocab_size=VOCAB_SIZE,
    pooling=PoolingInfo(hidden_size=2),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(post_mortem, "_folder", lambda: tmp_path / "post-mortems")
    return tmp_path / "post-mortems"


def live_through(seed, num_steps, pools=0.0, has_tier=False, **options):
    """The history of a core after random requests, aborts, pauses, resets and updates."""
    choose = random.Random(seed)
    scripts = {i: [100 * i + j for j in range(i % 11)] + [STOP] for i in range(0, 5_000, 3)}
    executor = FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE, scripts=scripts, **options)
    next_id, version, tier = 0, 0, None
    if has_tier:
        store = executor.transfer.store = FakeStore(misses=0.1, forgets=0.1, seed=seed)
        size = num_slot_bytes(4)
        tier = Tier(store, block_bytes=size, weights=lambda: f"{version}", save_now=executor.save_kv)
    core = EngineCore(executor, msgspec.structs.replace(CONFIG, has_tier=has_tier), tier=tier)
    history = History(core)
    for _ in range(num_steps):
        if choose.random() < 0.4:
            shared = [7] * choose.choice([0, 20, 40])
            request = EngineCoreRequest(
                prompt_token_ids=shared + [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, 20))],
                params=SamplingParams(n=choose.choice([1, 1, 3])),
                max_tokens=choose.randint(1, 30),
                seed=next_id,
                first_sequence_id=next_id,
                eos_token_ids=[STOP],
            )
            if pools and choose.random() < pools:
                pooling = PoolingParams(kind=choose.choice(["last", "mean"]))
                request = msgspec.structs.replace(request, params=SamplingParams(), max_tokens=0, pooling=pooling)
            next_id += request.params.n
            core.add_request(request)
        if choose.random() < 0.05 and core.unfinished_sequences:
            core.abort_sequences([choose.choice(core.unfinished_sequences)])
        if choose.random() < 0.05:
            core.pause(choose.choice(["abort", "keep"]), clear_cache=choose.random() < 0.5)
            core.resume()
        if choose.random() < 0.03:
            core.reset_prefix_cache(reset_running_requests=choose.random() < 0.5)
        if choose.random() < 0.03:
            version += 1
            core.begin_update()
            executor.transfer.weights_serial = version
            core.commit_version(version, choose.choice(["keep", "recompute"]))
            core.end_update(dirty=False)
        core.step()
        core.check_integrity()
    return history


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_the_whole_life_of_a_core_replays_to_the_same_schedule(folder, monkeypatch, seed):
    monkeypatch.setattr("rollout_engine.engine.history._NUM_ENTRIES", 10_000)
    history = live_through(seed, num_steps=300, pools=0.2 * (seed % 2))
    path = post_mortem.write_post_mortem(history, "the test ends it")
    lines = post_mortem.read_post_mortem(path)
    assert lines[0].is_whole and lines[0].reason == "the test ends it"
    kinds = [type(line) for line in lines]
    assert {AddLine, CallLine, StepLine, EndLine} <= set(kinds)
    found = replay(lines)
    assert (found.num_steps, found.difference, found.failure) == (300, "", "")


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(2))
def test_blocks_that_a_connector_gave_are_given_again(folder, monkeypatch, seed):
    monkeypatch.setattr("rollout_engine.engine.history._NUM_ENTRIES", 10_000)
    history = live_through(seed, num_steps=300, has_tier=True)
    assert history._core.stats.kv_tier.num_loaded > 5
    found = replay(post_mortem.read_post_mortem(post_mortem.write_post_mortem(history, "the test ends it")))
    assert (found.num_steps, found.difference, found.failure) == (300, "", "")


IMAGE = 11


def test_prompts_with_pictures_replay_without_any_and_leave_no_arrays_in_memory(folder):
    config = msgspec.structs.replace(CONFIG, pictures=PictureInfo(IMAGE))
    core = EngineCore(FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE, image_token_id=IMAGE), config)
    history, arrays = History(core), []
    for first in range(12):
        pixels = np.full(5, first % 3, np.float32)
        arrays.append(weakref.ref(pixels))
        core.add_request(
            EngineCoreRequest(
                prompt_token_ids=[7, 8, *[IMAGE] * 6, *range(9)],
                params=SamplingParams(),
                max_tokens=3,
                seed=first,
                first_sequence_id=first,
                pictures=[PlacedPicture(2, 8, Picture.of({"pixel_values": pixels}))],
            )
        )
        del pixels
        for _ in range(4):
            core.step()
    assert 8 * 16 < core.stats.num_cached_tokens < 11 * 16
    gc.collect()
    assert not any(each() is not None for each in arrays), "a request that has ended keeps its pictures"
    found = replay(post_mortem.read_post_mortem(post_mortem.write_post_mortem(history, "x")))
    assert (found.num_steps, found.difference, found.failure) == (48, "", "")


def test_failed_steps_fail_again_in_the_replay(folder, monkeypatch):
    monkeypatch.setattr("rollout_engine.engine.history._NUM_ENTRIES", 10_000)
    history = live_through(1, num_steps=120, fail_at_steps={30, 50})
    assert history._core.stats.num_failed_steps == 2
    found = replay(post_mortem.read_post_mortem(post_mortem.write_post_mortem(history, "x")))
    assert (found.num_steps, found.difference, found.failure) == (120, "", "")


def test_a_long_life_is_kept_in_bounds_and_its_end_replays(folder, monkeypatch):
    monkeypatch.setattr("rollout_engine.engine.history._NUM_ENTRIES", 200)
    history = live_through(1, num_steps=700)
    lines = post_mortem.read_post_mortem(post_mortem.write_post_mortem(history, "x"))
    assert not lines[0].is_whole
    assert 100 <= sum(isinstance(line, EndLine) for line in lines) <= 400
    assert any(isinstance(line, LiveLine) for line in lines)
    assert replay(lines).failure == ""


def test_the_step_in_progress_is_the_last_one_in_the_file(folder):
    class Stuck(FakeExecutor):
        def execute(self, work):
            if work.step == 3:
                self.path = post_mortem.write_post_mortem(history, "x")
            return super().execute(work)

    executor = Stuck(block_size=4, vocab_size=VOCAB_SIZE)
    core = EngineCore(executor, CONFIG)
    history = History(core)
    core.add_request(
        EngineCoreRequest(prompt_token_ids=[7], params=SamplingParams(), max_tokens=9, seed=0, first_sequence_id=0)
    )
    for _ in range(6):
        core.step()
    lines = post_mortem.read_post_mortem(executor.path)
    assert sum(isinstance(line, EndLine) for line in lines) == 3
    assert isinstance(lines[-1], StepLine) and lines[-1].step == 3 and lines[-1].rows == [(0, 3, 1)]


def test_a_flood_of_requests_ends_generations_too():
    core = EngineCore(FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE), CONFIG)
    history = History(core)
    for _ in range(20_000):
        core.abort_sequences([5])
    assert sum(len(generation.entries) for generation in history.generations) <= 2 * 1024


def test_a_fault_of_the_scheduler_fails_alone_and_one_of_the_model_does_not(folder, monkeypatch, capsys):
    monkeypatch.setattr("rollout_engine.engine.history._NUM_ENTRIES", 10_000)
    path = post_mortem.write_post_mortem(
        live_through(2, num_steps=60), "it failed: OSError: x", "Traceback of the death"
    )
    assert main(["postmortem", str(path), "--replay"]) == 0
    printed = capsys.readouterr().out
    assert "it failed: OSError: x" in printed and "Traceback of the death" in printed
    assert "replayed 60 steps without a model; each scheduled as recorded" in printed
    assert "the scheduler alone does not fail" in printed
    monkeypatch.setattr(Scheduler, "_take_finished", lambda self: [])
    assert main(["postmortem", str(path), "--replay"]) == 0
    assert (
        "the scheduler fails alone:" in capsys.readouterr().out or replay(post_mortem.read_post_mortem(path)).difference
    )


CRASHING = """
import ctypes, sys
from rollout_engine.process.post_mortem import catch_crashes
catch_crashes(sys.argv[1])
ctypes.string_at(0)
"""


def test_the_stacks_of_a_crash_are_printed(folder, tmp_path, capsys):
    with subprocess.Popen([sys.executable, "-c", CRASHING, str(tmp_path)]) as core:
        assert core.wait() < 0
    path = post_mortem.keep_stacks(str(tmp_path), core.pid)
    assert main(["postmortem", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "native code of a core crashed" in printed and "Fatal Python error" in printed and "string_at" in printed
    assert main(["postmortem", str(path), "--replay"]) != 0
    assert "must be with a file named *.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"hello", b"\xff"])
def test_what_holds_no_stacks_is_refused(tmp_path, content):
    path = tmp_path / "a.stacks"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=r"a\.stacks"):
        post_mortem.read_stacks(path)


def test_the_last_steps_are_printed_and_prompts_are_not_in_the_file(folder, capsys):
    core = EngineCore(FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE), CONFIG)
    history = History(core)
    secret = [97, 98, 99, 100] * 5
    for first in (0, 1):
        core.add_request(
            EngineCoreRequest(
                prompt_token_ids=secret,
                params=SamplingParams(),
                max_tokens=3,
                seed=0,
                first_sequence_id=first,
                cache_salt="s",
            )
        )
    core.step()
    core.step()
    path = post_mortem.write_post_mortem(history, "x")
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "97,98" not in text
    adds = [line for line in post_mortem.read_post_mortem(path) if isinstance(line, AddLine)]
    assert adds[0].request.blocks == adds[1].request.blocks and len(adds[0].request.blocks) == 5
    assert main(["postmortem", str(path), "--last", "2"]) == 0
    printed = capsys.readouterr().out
    assert "step 1, version 0:" in printed and "0 [20, 21)" in printed
    assert printed.count("\n") == 4


def test_old_files_are_forgotten_and_other_files_refused(folder, tmp_path, monkeypatch, capsys):
    core = EngineCore(FakeExecutor(block_size=4, vocab_size=VOCAB_SIZE), CONFIG)
    history = History(core)
    for i in range(40):
        monkeypatch.setattr(post_mortem.os, "getpid", lambda i=i: 100 + i)
        assert post_mortem.write_post_mortem(history, "x") is not None
    assert len(list(folder.iterdir())) == 32
    for content in ("", "{}", "not json", msgspec.json.encode({"type": "live"}).decode()):
        path = tmp_path / "other.jsonl"
        path.write_text(content)
        with pytest.raises(RequestError, match="is no post-mortem file"):
            post_mortem.read_post_mortem(path)
    assert main(["postmortem", str(tmp_path / "absent")]) == 2
    assert "is no post-mortem file" in capsys.readouterr().err
