"""The whole engine on a device beside the one on the CPU: the same tokens, and log-probs within rounding."""

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import LifecycleError, SamplingParams
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.model.cuda import host_draws
from rollout_engine.model.cuda.captured_graphs import NoRoomForGraph
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs
from rollout_engine.model.sampling import logit_rows

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)

PROMPTS = [[7, 8, 9], list(range(40, 62))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_k=20, max_tokens=3, logprobs=0, n=2, seed=3, ignore_eos=True)
BOUND = 2e-4
"""Of log-probs in float32: sums of another order over two layers."""


def run(llm, params, prompts=PROMPTS):
    """(tokens, log-probs) of every completion."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(list(c.token_ids), np.array(c.logprobs)) for output in outputs for c in output.outputs]


def assert_alike(ours, theirs, bound=BOUND):
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=bound, rtol=0)


class Rerun:
    """Where there are no graphs: the computation itself, over the memory that a graph would read."""

    def __init__(self, compute):
        self.replay = compute


@contextmanager
def graphs_by(capture, runner, sizes):
    """Steps of `sizes` sequences that decode are captured by `capture`."""
    vocab_size = runner.model.module.config.vocab_size
    runner.graphs = DecodeGraphs(
        *(runner.model, runner.rows, max(sizes)), vocab_size=vocab_size, shares_prefixes=True, capture=capture
    )
    runner.graphs._sizes = sizes
    try:
        yield
    finally:
        runner.graphs = None


def runner_of(llm):
    return llm.frontend.client.driver.executor.worker.runner


@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(DRAWN, id="drawn")]
)
def test_tokens_and_logprobs_are_those_of_the_cpu(engine_on, params):
    ours = engine_on("device")
    assert runner_of(ours).model.decoder is not None
    assert_alike(run(ours, params), run(engine_on("cpu"), params))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_size_of_blocks_changes_no_bit(engine_on, deterministic):
    """Of 16 tokens, as elsewhere here, and of 64, a device's default: whole tiles of attention. In float32 as many
    programs decode with either."""
    prompts = [[5] * 70 + [each] for each in (6, 7)]
    options = {"max_model_len": 96, "deterministic": deterministic}
    small, large = (engine_on("device", block_size=size, **options) for size in (16, 64))
    assert_alike(run(large, DRAWN, prompts), run(small, DRAWN, prompts), bound=0)


def test_layers_of_another_architecture_run_as_modules_over_the_same_pool(engine_on):
    ours = engine_on("device", "gemma2")
    assert runner_of(ours).model.decoder is None
    assert_alike(run(ours, GREEDY), run(engine_on("cpu", "gemma2"), GREEDY))


EDITED = [
    SamplingParams(
        temperature=0.7, presence_penalty=1.0, repetition_penalty=1.3, prompt_logprobs=1, logprobs=2, seed=5
    ),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias={7: 4.0, 9: -3.0}, logprobs=0, seed=6),
    SamplingParams(
        temperature=0.8,
        allowed_token_ids=list(range(0, 200, 3)),
        min_tokens=2,
        stop_token_ids=list(range(0, 90, 3)),
        top_k=9,
        min_p=0.02,
        logprobs=3,
        logprobs_mode="processed",
        seed=7,
    ),
    SamplingParams(temperature=0.6, top_p=0.9, logprobs=1, logprobs_mode="processed", seed=8),
    SamplingParams(temperature=0.6, top_p=0.9, logprobs=1, logprobs_mode="raw", presence_penalty=0.5, seed=9),
    SamplingParams(temperature=1.5, logprobs=2, logprobs_mode="raw", seed=10),
    SamplingParams(temperature=0.9, top_k=20, logprobs=0, seed=11),
]
EDITED = [msgspec.structs.replace(each, max_tokens=5, ignore_eos=True) for each in EDITED]


def complete(llm, params, prompts):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(output, output.outputs[0]) for output in outputs]


def assert_outputs_alike(ours, theirs):
    """All that is told of draws."""
    for (output, mine), (expected, other) in zip(ours, theirs, strict=True):
        assert mine.error is None and list(mine.token_ids) == list(other.token_ids)
        assert mine.finish_reason == other.finish_reason
        for name in ("logprobs", "kept_logprob_mass"):
            values = getattr(other, name)
            assert (getattr(mine, name) is None) == (values is None)
            if values is not None:
                np.testing.assert_allclose(getattr(mine, name), values, atol=BOUND)
        assert (mine.top_logprobs is None) == (other.top_logprobs is None)
        if other.top_logprobs is not None:
            np.testing.assert_array_equal(mine.top_logprobs[0], other.top_logprobs[0])
            np.testing.assert_allclose(mine.top_logprobs[1], other.top_logprobs[1], atol=BOUND)
        if expected.prompt_logprobs is not None:
            np.testing.assert_allclose(output.prompt_logprobs, expected.prompt_logprobs, atol=BOUND)
            np.testing.assert_array_equal(output.prompt_ranks, expected.prompt_ranks)


@contextmanager
def nothing_drawn_on_the_host(monkeypatch):
    def fail(*args):
        raise AssertionError("drawn on the host")

    with monkeypatch.context() as patch:
        patch.setattr(host_draws, "sample", fail)
        yield


@pytest.mark.slow
def test_any_mix_of_edits_and_log_probs_is_drawn_on_the_device_as_on_the_cpu(engine_on, monkeypatch):
    prompts = [[7 + i, 8, 9, 40 + i] for i in range(len(EDITED))]
    theirs = complete(engine_on("cpu"), EDITED, prompts)
    with nothing_drawn_on_the_host(monkeypatch):
        assert_outputs_alike(complete(engine_on("device"), EDITED, prompts), theirs)


@pytest.mark.slow
def test_edits_know_every_token_after_preemption_too(engine_on, monkeypatch):
    """Blocks for about two of four sequences at their ends."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=20, logprobs=0, ignore_eos=True)
    prompts = [[5 + i, 6, 7] for i in range(4)]
    small = {"num_kv_blocks": 4, "enable_prefix_caching": False}
    preempted = engine_on("device", **small)
    with nothing_drawn_on_the_host(monkeypatch):
        ours = complete(preempted, params, prompts)
    assert preempted.llm_engine.stats.num_preemptions > 0
    assert_outputs_alike(ours, complete(engine_on("cpu"), params, prompts))


class OnlyOdd:
    """A user's own code."""

    def __init__(self, vocab_size):
        pass

    def wants(self, params):
        return params.extra_args is not None

    def apply(self, logits, sequence):
        logits[::2] = -torch.inf
        return logits


@pytest.mark.slow
def test_users_own_code_is_run_on_the_host_beside_rows_that_are_edited_on_the_device(engine_on):
    own = {"extra_args": {}, "max_tokens": 4, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.7, top_k=9, presence_penalty=1.0, logprobs=2, seed=1, **own),
        EDITED[2],
        SamplingParams(temperature=0.7, logprobs=1, logprobs_mode="processed", seed=2, **own),
        EDITED[6],
    ]
    prompts = [[7 + i, 8] for i in range(len(params))]
    processors = {"logits_processors": (f"{__name__}:OnlyOdd",)}
    ours, theirs = (complete(engine_on(place, **processors), params, prompts) for place in ("device", "cpu"))
    assert_outputs_alike(ours, theirs)
    assert all(token % 2 for place in (0, 2) for token in ours[place][1].token_ids)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.slow
def test_head_and_draws_run_over_pieces_and_change_no_bit(engine_on, monkeypatch, special):
    """Special: rows edited on the device and on the host, raw and processed log-probs, top tokens."""
    given = [DRAWN.clone(n=4, max_tokens=2), GREEDY.clone(n=2, max_tokens=2)]
    if special:
        own = SamplingParams(temperature=0.7, logprobs=1, seed=2, extra_args={}, max_tokens=2, ignore_eos=True)
        given = [each.clone(n=3, max_tokens=2) for each in (*EDITED, own)]
    llm = engine_on("device", **({"logits_processors": (f"{__name__}:OnlyOdd",)} if special else {}))
    prompts, drawn, found = [[7 + i, 8, 9] for i in range(len(given))], [], []
    sampler = runner_of(llm).drawing.sampler
    draw = sampler.draw

    def counted(logits, *args):
        drawn.append(len(logits))
        return draw(logits, *args)

    monkeypatch.setattr(sampler, "draw", counted)
    for num_rows in (100, 2):
        monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", num_rows * 259)
        drawn.clear()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], given, use_tqdm=False)
        found.append([sample for output in outputs for sample in output.outputs])
        assert (max(drawn) <= 2) == (num_rows == 2)
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, one.error) == (other.token_ids, None)
        for name in ("logprobs", "kept_logprob_mass", "sampled_ranks", "top_logprobs"):
            for mine, theirs in zip(_arrays(getattr(one, name)), _arrays(getattr(other, name)), strict=True):
                if not special:  # at the first token both prompts' logits are one product in either run
                    np.testing.assert_array_equal(mine[0], theirs[0])
                np.testing.assert_allclose(mine, theirs, atol=1e-5)  # torch's products round by the batch


def _arrays(value):
    return () if value is None else value if isinstance(value, tuple) else (value,)


def test_a_request_that_forbids_every_token_fails_alone(engine_on):
    stops = SamplingParams(allowed_token_ids=[5], min_tokens=1, stop_token_ids=[5], max_tokens=2)
    ours, theirs = (complete(engine_on(place), [stops, GREEDY], PROMPTS) for place in ("device", "cpu"))
    assert ours[0][1].error == theirs[0][1].error
    assert "allowed_token_ids" in ours[0][1].error
    assert ours[1][1].token_ids == theirs[1][1].token_ids


@pytest.mark.slow
def test_a_step_is_launched_before_the_one_behind_it_is_known(engine_on):
    assert_alike(run(engine_on("device"), DRAWN), run(engine_on("device", async_scheduling=False), DRAWN))


@pytest.mark.slow
def test_new_weights_are_written_where_the_kernels_read_them(engine_on):
    engines = [engine_on(place) for place in ("device", "cpu")]
    weights = engines[1].llm_engine.apply_model(lambda module: module.state_dict())[0]
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    scaled = {name: tensor * 0.5 if "norm" in name else tensor for name, tensor in weights.items()}
    for values in (scaled, weights):
        for llm in engines:
            llm.update_weights(values)
        assert_alike(run(engines[0], GREEDY), run(engines[1], GREEDY))


def test_each_commit_is_one_copy_over_addresses_that_are_told_once(engine_on, monkeypatch):
    llm, made, run_copy = engine_on("device"), [], FusedCopy.run
    weights = engine_on("cpu").llm_engine.apply_model(lambda module: {k: v * 1 for k, v in module.state_dict().items()})
    before, total = llm.collective_rpc("get_weight_digest")[0], sum(v.nbytes for v in weights[0].values())
    llm.frontend.client.driver.executor.updater.release(forget=False)  # of earlier updates
    monkeypatch.setattr(FusedCopy, "run", lambda self: made.append(self) or run_copy(self))
    for factor in (2, 1):
        report = llm.update_weights({k: v * factor for k, v in weights[0].items()})
        assert report.digest == llm.collective_rpc("get_weight_digest")[0]
        assert (report.digest == before) == (factor == 1)
    first, second = (copy for copy in made if copy.num_bytes == total)
    assert first is second


@pytest.mark.slow
def test_scores_are_those_of_the_cpu(engine_on):
    completions = [[11, 12, 13], [5, 6]]
    ours, theirs = (engine_on(place).score(PROMPTS, completions) for place in ("device", "cpu"))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=BOUND)


@pytest.mark.slow
def test_padded_batches_replayed_from_static_memory_change_no_bit(engine_on):
    llm = engine_on("device")
    plain = run(llm, DRAWN)
    captured = []
    with graphs_by(lambda compute: captured.append(Rerun(compute)) or captured[-1], runner_of(llm), sizes=[4]):
        assert_alike(run(llm, DRAWN), plain, bound=1e-5)
    assert len(captured) == 1


@pytest.mark.slow
def test_steps_replayed_from_static_memory_draw_all_that_others_draw(engine_on, monkeypatch):
    """Edits, truncation and other log-probs are drawn after the replay; four of the seven at a time."""
    llm, replayed = engine_on("device"), []
    prompts = [[7 + i, 8, 9, 40 + i] for i in range(len(EDITED))]
    plain = complete(llm, EDITED, prompts)
    with graphs_by(lambda compute: Rerun(lambda: replayed.append(1) or compute()), runner_of(llm), sizes=[1, 2, 4]):
        assert_outputs_alike(complete(llm, EDITED, prompts), plain)
    assert len(replayed) > 4


@pytest.mark.slow
def test_graphs_follow_last_tokens_that_have_moved(engine_on):
    llm, captured = engine_on("device"), []
    plain = run(llm, GREEDY)
    with graphs_by(lambda compute: captured.append(1) or Rerun(compute), runner_of(llm), sizes=[2]):
        assert_alike(run(llm, GREEDY), plain)
        num_captured, rows = len(captured), runner_of(llm).rows
        rows.last_tokens = rows.last_tokens.clone()
        assert_alike(run(llm, GREEDY), plain)
    assert len(captured) == 2 * num_captured


@pytest.mark.slow
def test_steps_that_no_graph_holds_run_without_and_others_by_what_was_captured(engine_on):
    llm = engine_on("device")
    plain, one = run(llm, DRAWN), run(llm, GREEDY, PROMPTS[:1])
    runner, sizes, captured, replayed = runner_of(llm), [4, 4, 2, 2, 1, 1], [], []

    def capture(compute):
        """There is no room for those of 4 sequences, and the first of one fails."""
        size = sizes[len(captured) % len(sizes)]
        captured.append(size)
        if size == 4:
            raise NoRoomForGraph("3 MiB are free")
        if size == 1:
            raise RuntimeError("not permitted")
        return Rerun(lambda: replayed.append(size) or compute())

    with graphs_by(capture, runner, sizes=[1, 2, 4]):
        runner.graphs.capture_all()
        assert_alike(run(llm, DRAWN), plain)
        assert captured == sizes[:5] and not replayed
        assert_alike(run(llm, GREEDY, PROMPTS[:1]), one)
        assert set(replayed) == {2}


@pytest.mark.slow
def test_memory_that_runs_out_fails_the_step_and_the_engine_lives(engine_on, monkeypatch):
    llm = engine_on("device")

    def fail(*args):
        raise torch.OutOfMemoryError("of 12 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm).model, "forward_rows", fail)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    errors = [output.outputs[0].error for output in outputs]
    assert all("StepMemoryError: The device ran out of memory" in error for error in errors)
    assert_alike(run(llm, GREEDY), run(engine_on("cpu"), GREEDY))


@pytest.mark.slow
def test_a_sleeping_engine_holds_neither_kv_nor_weights_and_wakes_with_both_or_takes_new_weights(engine_on):
    # An engine of its own: weights of the host that were once digested keep their memory.
    llm, captured = engine_on("device", max_num_seqs=3), []
    before = run(llm, GREEDY)
    (awake,) = llm.collective_rpc("get_memory_usage")
    with graphs_by(lambda compute: captured.append(1) or Rerun(compute), runner_of(llm), sizes=[2]):
        assert_alike(run(llm, GREEDY), before)
        num_captured = len(captured)
        for _ in range(2):
            llm.sleep(1)
            llm.llm_engine.step()  # for the runner to forget what has ended
            (asleep,) = llm.collective_rpc("get_memory_usage")
            assert asleep["kv_cache"] == asleep["weights"] == 0
            assert runner_of(llm).graphs._graphs == {}, "graphs hold memory, and know addresses that have moved"
            with pytest.raises(LifecycleError, match="has no values now: weights were released"):
                llm.collective_rpc("get_weight_digest")
            llm.wake_up()
            assert_alike(run(llm, GREEDY), before)
        assert len(captured) == 3 * num_captured
    assert llm.collective_rpc("get_memory_usage")[0]["weights"] == awake["weights"] > 0
    llm.sleep(1)
    llm.sleep(2)
    llm.wake_up(["weights"])
    assert llm.collective_rpc("get_memory_usage")[0]["weights"] == 0
    theirs = engine_on("cpu").llm_engine.apply_model(lambda module: {k: v * 1 for k, v in module.state_dict().items()})
    llm.update_weights(theirs[0])
    llm.wake_up()
    assert_alike(run(llm, GREEDY), before)


@pytest.mark.slow
def test_deterministic_bits_depend_on_no_batch_chunk_or_prefix(engine_on):
    llm = engine_on("device", deterministic=True)
    together = run(llm, DRAWN, [*PROMPTS, PROMPTS[1]])
    llm.reset_prefix_cache()
    assert_alike(run(llm, DRAWN, PROMPTS[1:]), together[2:4], bound=0)
    assert_alike(run(llm, DRAWN, PROMPTS[1:]), together[2:4], bound=0)


def test_scores_compute_a_shared_beginning_once_and_candidates_are_parts_of_one_softmax(engine_on, monkeypatch):
    llm = engine_on("device", deterministic=True)
    prompt, completions = PROMPTS[1], [[5, 6], [5, 7], [9]]
    alone = [llm.score_candidates([prompt], [each], [each] * len(each), top_k=2) for each in ([5, 6], [5, 7], [9])]
    model, sizes = runner_of(llm).model, []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch, *given: sizes.append(len(batch[0])) or forward(batch, *given))
    found = llm.score_candidates([prompt] * 3, completions, [[5, 6], [6, 5], [5, 7], [7, 5], [9, 5]], top_k=2)
    assert sizes == [23, 2, 1]
    assert np.array_equal(found.logprobs, np.concatenate([each.logprobs for each in alone]))
    assert np.array_equal(found.top_ids, np.concatenate([each.top_ids for each in alone]))
    assert np.array_equal(found.top_logprobs, np.concatenate([each.top_logprobs for each in alone]))
    assert found.candidates[[0, 2, 4], 0].tolist() == [alone[i].candidates[0, 0] for i in range(3)]
    assert found.candidates[:, 0][[0, 2, 4]].tolist() == found.logprobs[[0, 2, 4]].tolist()
    theirs = engine_on("cpu").score_candidates([prompt] * 3, completions, np.arange(10).reshape(5, 2), top_k=2)
    ours = llm.score_candidates([prompt] * 3, completions, np.arange(10).reshape(5, 2), top_k=2)
    np.testing.assert_allclose(ours.candidates, theirs.candidates, atol=BOUND, rtol=0)
