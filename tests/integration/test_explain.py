"""Tokens of logged rollouts explained by the trace of the engine that drew them."""

import pytest

from rollout_engine import RequestError, RolloutPolicy, SamplingParams, read_jsonl
from rollout_engine.cli.main import main
from rollout_engine.core.draft_choice import StepCosts
from rollout_engine.rollouts.explain import explain
from rollout_engine.testing import tiny_checkpoint

PROMPTS = ["Once upon a time there was", "Hello"]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def rolled(checkpoint, tmp_path, params=PARAMS, **options):
    """Roll out over a small pool, so that sequences are preempted. Returns the samples, and the engine's counters."""
    log = tmp_path / "rollouts.jsonl"
    given = dict(num_kv_blocks=20, max_num_batched_tokens=16, step_trace=tmp_path / "trace") | options
    with RolloutPolicy.from_pretrained(checkpoint, **given) as policy:
        policy.rollout(PROMPTS, params, num_samples=4, seed=1, log_to=log, use_tqdm=False)
        policy.rollout(PROMPTS, params, num_samples=4, seed=2, log_to=log, use_tqdm=False)
        return read_jsonl(log), policy.get_metrics().core.counters


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def made(checkpoint, run):
    return rolled(checkpoint, run)


def test_every_token_has_one_step_and_steps_of_a_sample_ascend(made, run):
    samples, counters = made
    for sample in samples[::3]:
        origins = [explain(sample, place, run / "trace")[0] for place in range(0, 40, 7)]
        numbers = [origin.step.step for origin in origins]
        assert numbers == sorted(set(numbers)) and numbers[-1] < counters.num_steps
        for place, origin in zip(range(0, 40, 7), origins, strict=True):
            assert origin.position == len(sample["prompt_token_ids"]) + place
            assert origin.sequence.seed == sample["seed"] and origin.step.version == 0 and origin.num_others == 0


def test_prompts_computed_for_all_samples_cached_prefixes_and_lost_kv_are_told(made, run):
    samples, counters = made
    first, sibling, later = (explain(samples[i], 0, run / "trace")[0] for i in (0, 1, 8))
    assert first.computed[0].num_cached_tokens == 0 and len(first.computed[0].steps) == 2  # 26 tokens, 16 a step
    assert sibling.computed[0].by == first.sequence.id == first.computed[0].by
    assert later.computed[0].num_cached_tokens == 16  # the first block, known from the rollout before
    assert counters.num_preemptions > 0
    last = [explain(sample, 39, run / "trace")[0] for sample in samples]
    losses = sum(len(origin.computed) - 1 for origin in last)
    assert losses == counters.num_preemptions + counters.num_references_dropped


def test_the_text_names_the_batch_and_what_happened(made, run):
    samples, _ = made
    _, text = explain(samples[1], 0, run / "trace", samples)
    assert "group 0, sample 1, token 0 of the response: id" in text
    assert "by sequence 0, for all samples of its prompt: nothing was cached" in text
    assert "of group 0" in text and "of group 1" in text
    texts = [explain(sample, 39, run / "trace", samples)[1] for sample in samples]
    assert any("it lost its KV (preempted" in text for text in texts)


def test_a_drafted_token_is_told_from_a_drawn_one(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(StepCosts, "of", lambda costs, num_rows: 1.0)  # every draft pays, on however busy a machine
    greedy = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    options = {"max_draft_tokens": 4}
    samples, counters = rolled(checkpoint, tmp_path, greedy, num_kv_blocks=256, speculation=options)
    places = [explain(sample, i, tmp_path / "trace")[0].draft_place for sample in samples for i in range(40)]
    assert sum(map(bool, places)) == sum(counters.drafts.num_accepted) > 0


def test_each_version_of_the_same_seed_and_prompt_is_told_apart(checkpoint, tmp_path):
    log = tmp_path / "rollouts.jsonl"
    with RolloutPolicy.from_pretrained(checkpoint, num_kv_blocks=64, step_trace=tmp_path / "trace") as policy:
        for _ in range(2):
            policy.rollout(PROMPTS, PARAMS, num_samples=1, seed=1, log_to=log, use_tqdm=False)
        policy.update_weights(str(checkpoint))
        policy.rollout(PROMPTS, PARAMS, num_samples=1, seed=1, log_to=log, use_tqdm=False)
    origins = [explain(sample, 5, tmp_path / "trace")[0] for sample in read_jsonl(log)[::2]]
    assert [(each.step.version, each.num_others) for each in origins] == [(0, 0), (0, 0), (1, 0)]
    steps = [each.step.step for each in origins]
    assert steps == sorted(set(steps))


def test_steps_of_another_run_of_the_same_seeds_are_not_taken_for_those_of_this_one(made, run):
    sample = made[0][0]
    since, until = sample["made"]
    step = explain(sample, 5, run / "trace")[0].step
    assert since <= step.at <= until
    for moved in (-3600, 3600):
        with pytest.raises(RequestError, match="another engine drew the token"):
            explain(sample | {"made": [since + moved, until + moved]}, 5, run / "trace")


def test_a_line_without_its_time_is_explained_by_the_newest_of_its_seed(checkpoint, tmp_path):
    log = tmp_path / "rollouts.jsonl"
    with RolloutPolicy.from_pretrained(checkpoint, num_kv_blocks=64, step_trace=tmp_path / "trace") as policy:
        for _ in range(2):
            policy.rollout(PROMPTS, PARAMS, num_samples=1, seed=1, log_to=log, use_tqdm=False)
    first, _, second, _ = read_jsonl(log)
    newest, _ = explain(second, 5, tmp_path / "trace")
    del first["made"]  # as in files of older versions
    origin, text = explain(first, 5, tmp_path / "trace")
    assert origin.step == newest.step and origin.num_others == 1
    assert "this is the newest: 1 more of that time" in text


def test_the_command_explains_without_a_model(made, run, capsys):
    file = str(run / "rollouts.jsonl")
    assert main(["replay", file, "--sample", "1", "--explain", "--token", "3"]) == 0
    assert "group 0, sample 1, token 3 of the response" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain"], "--explain needs --sample K"),
        (["--explain", "--sample", "0", "--token", "40"], "--token=40 is not allowed: must be from 0 to 39"),
        (["--explain", "--sample", "0", "--trace", "nowhere"], "must be a directory with traces"),
        (["--explain", "--sample", "0", "--trace", "."], "must be a trace that has this token"),
        (["--sample", "0", "--token", "0"], "--token=0 is not allowed: must be absent without --explain"),
        (["--trace", "trace"], "--trace='trace' is not allowed: must be absent without --explain"),
    ],
)
def test_what_cannot_be_explained_is_said_in_one_line(made, run, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(run)
    assert main(["replay", "rollouts.jsonl", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_trace_nothing_is_written_and_the_command_says_how_to_have_one(checkpoint, tmp_path, capsys):
    samples, _ = rolled(checkpoint, tmp_path, step_trace=None)
    assert "step_trace" not in samples[0]["engine"]
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]
    assert main(["replay", str(tmp_path / "rollouts.jsonl"), "--sample", "0", "--explain"]) == 2
    assert "EngineConfig(step_trace=DIR)" in capsys.readouterr().err
    with pytest.raises(RequestError, match="A template or an environment wrote this one"):
        explain(samples[0] | {"policy_version": [-1] * 40}, 0, tmp_path)
