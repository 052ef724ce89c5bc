"""Ranks capture the same graphs and replay them together, with the bits of one device.

The devices are those of `test_ranks.py`; a graph is the computation itself, over the memory that a graph would read.
"""

import pytest
import torch

from rollout_engine import ConfigError, SamplingParams
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.cuda.captured_graphs import NoRoomForGraph
from rollout_engine.testing import random_adapter, tiny_model
from tests.unit.model.cuda.rank_on_interpreter import Rerun, RerunPool, capture_by_rerunning, capture_everywhere
from tests.unit.model.cuda.test_ranks import (  # noqa: F401
    DRAWN,
    EXPERTS,
    PROMPTS,
    SMALL,
    engine,
    executor_of,
    said,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks' devices would be one"),
    # Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


SPLIT = {"deterministic": "auto"}
"""Ranks that split sums."""


@pytest.fixture
def captured(monkeypatch, engine):  # noqa: F811
    """A function as `engine`, whose engines capture graphs."""
    capture_by_rerunning(monkeypatch)

    def make(*args, **options):
        with monkeypatch.context() as patch:
            capture_everywhere(patch)
            patch.setenv("CAPTURES", "1")
            return engine(*args, **options)

    return make


def graphs_of(llm):
    return executor_of(llm).worker.runner.graphs


def num_replayed(call):
    """The result of `call`, and the number of graphs replayed meanwhile."""
    before = Rerun.num_replays
    return call(), Rerun.num_replays - before


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_two_devices_that_replay_graphs_say_what_one_says_without(engine, captured, architecture):  # noqa: F811
    fields = SMALL | (EXPERTS if architecture == "qwen3_moe" else {})
    one, two = engine(1, architecture, fields), captured(2, architecture, fields)
    assert graphs_of(one) is None and graphs_of(two).describe_count() == "6 of 6"
    found, num_replays = num_replayed(lambda: said(two))
    assert found == said(one) and num_replays >= DRAWN.max_tokens - 1
    source = tiny_model(architecture, seed=5, **fields)
    for staging in "shadow", "inplace":
        assert two.update_weights(source, staging=staging).digest == one.update_weights(source).digest
        found, num_replays = num_replayed(lambda: said(two))
        assert found == said(one) and num_replays >= DRAWN.max_tokens - 1


def test_prefixes_are_read_once_by_graphs_of_all_ranks(engine, captured):  # noqa: F811
    prompts = [{"prompt_token_ids": [5] * 520 + [each]} for each in (6, 7)]
    options = {"max_model_len": 544, "block_size": 64, "max_num_batched_tokens": 544}
    one, two = engine(1, fields=SMALL, **options), captured(2, fields=SMALL, **options)
    variants, run = [], graphs_of(two).run
    graphs_of(two).run = lambda step: variants.append(step.prefixes is not None) or run(step)
    assert said(two, prompts) == said(one, prompts) and any(variants)


@pytest.mark.parametrize("level", [1, 2])
def test_behind_a_sleep_graphs_are_captured_again_by_all_ranks(engine, captured, level):  # noqa: F811
    one, two = engine(1, fields=SMALL), captured(2, fields=SMALL)
    expected = said(one)
    assert said(two) == expected
    for _ in range(2):
        two.sleep(level=level)
        two.wake_up()
        if level == 2:
            two.update_weights(tiny_model("qwen3", **SMALL))
        assert graphs_of(two).describe_count() == "0 of 6"
        found, num_replays = num_replayed(lambda: said(two))
        assert found == expected and num_replays and graphs_of(two)._graphs


def test_graphs_with_adapters_are_captured_by_the_steps_that_need_them(engine, captured):  # noqa: F811
    one, two = (make(n, "llama", SMALL, max_loras=2) for n, make in ((1, engine), (2, captured)))
    found = []
    for llm in (two, one):
        llm.add_lora(random_adapter(tiny_model("llama", **SMALL), "a", seed=3, rank=8))
        outputs = llm.generate(PROMPTS, DRAWN, lora_request=["a", None], use_tqdm=False)
        found.append([(list(c.token_ids), c.logprobs.tobytes()) for output in outputs for c in output.outputs])
    assert found[0] == found[1]
    assert any(variant.has_adapters for _, variant in graphs_of(two)._graphs)


def test_a_graph_for_which_one_rank_has_no_room_is_left_out_by_all(monkeypatch, engine, captured, caplog):  # noqa: F811
    monkeypatch.setenv("NO_ROOM", "1")
    monkeypatch.setattr(RerunPool, "capture", _with_room)
    two, one = captured(2, fields=SMALL), engine(1, fields=SMALL)
    assert graphs_of(two).describe_count() == "0 of 6"
    assert "0 of 6 CUDA graphs were captured" in caplog.text and "another rank has no room" in caplog.text
    assert said(two) == said(one)


def test_a_capture_that_fails_on_another_rank_ends_the_start_with_advice(monkeypatch, captured):
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setattr(RerunPool, "capture", _with_room)
    with pytest.raises(ConfigError, match=r"not captured \(ValueError: not permitted\).*Give cuda_graphs=False"):
        captured(2, fields=SMALL)


def test_graphs_are_gone_before_the_group_is_left(monkeypatch, captured):
    two = captured(2, fields=SMALL)
    graphs, exchange, found = graphs_of(two), executor_of(two)._team.exchange, []
    assert graphs._graphs
    leave = exchange._joining.leave
    monkeypatch.setattr(exchange._joining, "leave", lambda: found.append(len(graphs._graphs)) or leave())
    two.shutdown()
    assert found and not any(found)


def test_without_graphs_none_are_captured(captured):
    two = captured(2, fields=SMALL, cuda_graphs=False)
    assert graphs_of(two) is None
    assert two.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def _with_room(pool, compute):
    """`RerunPool.capture` of rank 0, which has room; the others inherit its environment."""
    compute()
    if not pool._all_agree(True):
        raise NoRoomForGraph("another rank has no room")
    return Rerun(compute)


def test_sums_that_are_split_are_part_of_graphs(captured, engine):  # noqa: F811
    """The interpreter's products do not depend on the size of a batch: graphs have the bits of launches."""
    graphs, launches = captured(2, fields=SMALL, **SPLIT), engine(2, fields=SMALL, **SPLIT)
    before = Rerun.num_replays
    assert said(graphs) == said(launches)
    assert Rerun.num_replays > before
