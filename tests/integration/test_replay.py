"""Logged rollouts made again: bit for bit from their lines, or with the first difference and its cause."""

import asyncio
import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs_adapters import Observation
from rollout_engine import RolloutPolicy, SamplingParams, read_jsonl, replay
from rollout_engine.base.errors import RequestError, RolloutEngineError
from rollout_engine.cli.main import main
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from tests.integration.test_policy import perturbed
from tests.unit.looking.lines import rollouts

OPTIONS = dict(dtype="float32", num_kv_blocks=1024, max_model_len=256)
PROMPTS = ["one", "another", "a prompt of more than sixty-four tokens, so that it spans more than one tile of KV"]
PARAMS = SamplingParams(max_tokens=20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        yield policy


@pytest.fixture
def log(tmp_path):
    return tmp_path / "rollouts.jsonl"


def other_weights(checkpoint, path, seed=1):
    """A checkpoint with all weights moved."""
    model = perturbed(AutoModelForCausalLM.from_pretrained(checkpoint), seed)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(path)
    return path


def without_time(samples):
    """The lines without when they were made."""
    return [{name: value for name, value in sample.items() if name != "made"} for sample in samples]


def logged(policy, log, params=PARAMS, **options):
    policy.rollout(PROMPTS, params, log_to=log, use_tqdm=False, **({"num_samples": 3, "seed": 4} | options))
    return read_jsonl(log)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, top_k=50, min_p=0.01),
        SamplingParams(max_tokens=20, temperature=0, presence_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(max_tokens=20, min_tokens=8, logit_bias={7: 5.0, 9: -3.0}, stop=["e"], bad_words=["a"]),
        SamplingParams(max_tokens=20, logprobs_mode="processed", top_k=5),
    ],
    ids=["plain", "cut", "penalties", "edited", "processed"],
)
def test_every_sample_of_a_log_is_made_again_bit_for_bit(checkpoint, log, params):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        samples = logged(policy, log, params)
    with RolloutPolicy.from_pretrained(checkpoint, enable_prefix_caching=False, **OPTIONS) as another:
        reports = replay(another, samples)
    assert len(reports) == 9
    for sample, report in zip(samples, reports, strict=True):
        assert report.is_equal and report.causes == [], report
        assert report.num_tokens == len(sample["response_token_ids"])


def test_a_changed_weight_is_named_with_the_first_token_that_differs(policy, checkpoint, log, tmp_path):
    samples = logged(policy, log)
    policy.update_weights(str(other_weights(checkpoint, tmp_path / "moved")))
    for sample, report in zip(samples, replay(policy, samples), strict=True):
        [digest] = sample["weights"].values()
        assert not report.is_equal
        assert report.causes[0].startswith(f"other weights: digest {digest} sampled it")
        found = report.difference
        logged_token = (sample["response_token_ids"][found.place], sample["log_probs"][found.place])
        assert found.logged == logged_token != found.made


@pytest.mark.slow
def test_a_thousand_rollouts_are_made_again_and_one_changed_weight_is_named_by_each(policy, checkpoint, log, tmp_path):
    prompts = [f"prompt {i}" for i in range(125)]
    policy.rollout(prompts, PARAMS, num_samples=8, seed=1, log_to=log, use_tqdm=False)
    samples = read_jsonl(log)
    assert sum(report.is_equal and not report.causes for report in replay(policy, samples)) == 1000
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 5] += 0.5
    policy.update_weights(model)
    reports = replay(policy, samples)
    assert all(report.causes[0].startswith("other weights") for report in reports)
    assert sum(report.difference is not None for report in reports) > 990


def test_versions_of_a_run_are_found_by_their_digests(policy, checkpoint, log, tmp_path):
    folders = [str(other_weights(checkpoint, tmp_path / str(seed), seed)) for seed in (1, 2)]
    logged(policy, log)
    for folder in folders:
        policy.update_weights(folder)
        samples = logged(policy, log)
    assert len(samples) == 27 and len({next(iter(s["weights"].values())) for s in samples}) == 3
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as another:
        reports = replay(another, samples, weights=reversed(folders))
        assert all(report.is_equal and report.causes == [] for report in reports)


def test_pieces_over_an_update_are_made_again_each_under_its_own_weights(policy, checkpoint, log, tmp_path):
    moved = str(other_weights(checkpoint, tmp_path / "moved"))

    updates = iter([moved])

    def update_once(batch):
        for source in updates:
            policy.update_weights(source, kv="recompute")

    # The first group is short: when it is complete, the others are on their way.
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    params = [SamplingParams(max_tokens=4), long, long]
    policy.rollout(PROMPTS, params, num_samples=2, on_group=update_once, log_to=log, use_tqdm=False)
    samples = read_jsonl(log)
    assert any(len(sample["weights"]) == 2 for sample in samples)
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as another:
        reports = replay(another, samples, weights=[moved])
    assert all(report.is_equal for report in reports), [str(report) for report in reports]
    assert all(report.causes == [] for report in reports)


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=20, truncate_prompt_tokens=5)], ids=["", "cut"])
def test_pieces_are_not_truncated_or_stopped_as_if_each_was_a_response(policy, log, params):
    [*_, sample] = logged(policy, log, params)
    count, [digest] = len(sample["policy_version"]), sample["weights"].values()
    assert count > 6
    # As if an update to equal weights had come every three tokens.
    versions = [place // 3 for place in range(count)]
    stop = rf"\A[^\U{ord(sample['response'][0]):08x}]"  # the whole response does not match, pieces do
    sampling = sample["sampling"] | {"stop_regex": [stop]}
    divided = {
        "policy_version": versions,
        "kv_min_version": versions,
        "weights": dict.fromkeys(map(str, versions), digest),
    }
    [report] = replay(policy, [sample | divided | {"sampling": sampling}])
    assert report.is_equal and report.num_tokens == count, report


def test_tokens_over_kept_kv_are_left_out_and_counted(policy, log):
    [sample, *_] = logged(policy, log)
    count = len(sample["kv_min_version"])
    older = dict(sample, policy_version=[0] * 3 + [1] * (count - 3), weights={**sample["weights"], "1": None})
    [report] = replay(policy, [older])
    assert report.left_out == {"version 1 sampled them over KV of version 0": count - 3}
    assert report.num_tokens == 3 and report.difference is None and not report.is_equal


class Telling:
    """Three turns."""

    def reset(self, seed):
        self.left = 3
        return f"start {seed % 7}"

    def step(self, action):
        self.left -= 1
        return Observation(f"left: {self.left}", reward=1.0, terminated=self.left == 0)


def test_every_turn_of_an_episode_is_made_again(policy, log):
    policy.rollout(
        None, PARAMS, env=Telling, num_episodes=3, num_samples=2, max_turns=3, seed=5, log_to=log, use_tqdm=False
    )
    samples = read_jsonl(log)
    assert len(samples) == 6 and all(max(sample["turns"]) == 2 for sample in samples)
    for sample, report in zip(samples, replay(policy, samples), strict=True):
        assert report.is_equal, report
        assert report.num_tokens == sum(turn >= 0 for turn in sample["turns"])


def test_an_adapter_is_named_and_asked_for(policy, log, capsys):
    adapter = random_adapter(tiny_model(), "a", seed=1)
    samples = logged(policy, log, lora_request=adapter)
    assert samples[0]["lora"] | {"digest": ""} == {"name": "a", "revision": 0, "digest": ""}
    assert all(report.is_equal for report in replay(policy, samples))
    policy.remove_lora("a")
    with pytest.raises(RequestError, match="lora='a' is not allowed: must be an adapter that the policy has"):
        replay(policy, samples)
    assert main(["replay", str(log), "--sample", "4", "num_kv_blocks=1024", "max_model_len=256"]) == 2
    assert "lora='a' is not allowed" in capsys.readouterr().err
    policy.add_lora(random_adapter(tiny_model(), "a", seed=2))
    reports = replay(policy, samples)
    assert all(report.causes[0].startswith("other values of the adapter 'a'") for report in reports)
    assert not any(report.is_equal for report in reports)


def test_async_rollouts_and_collectors_log_the_same_lines(policy, log, tmp_path):
    expected = without_time(logged(policy, log))

    async def run(path):
        async for _ in policy.arollout(PROMPTS, PARAMS, num_samples=3, seed=4, log_to=path):
            pass

    asyncio.run(run(tmp_path / "async.jsonl"))
    with policy.collect(PROMPTS, PARAMS, num_samples=3, seed=4, log_to=tmp_path / "collected.jsonl") as collector:
        list(collector)
    for name in ("async.jsonl", "collected.jsonl"):
        found = without_time(read_jsonl(tmp_path / name))
        assert sorted(found, key=lambda s: (s["group_id"], s["sample_index"])) == sorted(
            expected, key=lambda s: (s["group_id"], s["sample_index"])
        )


@pytest.mark.parametrize("cut", ['{"group_id": 0, "pro', '{"columns": {"a": 1}', '{"response": "\\u00'])
def test_a_line_is_cut_off_wherever_it_was(log, cut, caplog):
    log.write_text(cut)
    assert read_jsonl(log) == []
    assert f"line 1 was cut off ({len(cut)} bytes)" in caplog.text


def test_a_log_is_appended_to_and_a_line_cut_off_spoils_itself_alone(policy, log, caplog):
    first = logged(policy, log)
    with open(log, "a") as file:
        file.write(json.dumps(first[0])[:100])
    again = logged(policy, log)
    assert without_time(again) == without_time(first + first)
    assert "line 10 was cut off (100 bytes)" in caplog.text


def test_other_bits_are_expected_of_another_machine_or_library(policy, log):
    [sample, *_] = logged(policy, log)
    made_with = sample["engine"]["made_with"] | {"torch": "1.0"}
    [report] = replay(policy, [dict(sample, engine={**sample["engine"], "made_with": made_with})])
    assert report.causes == [f"another torch: it was '1.0', and is {torch.__version__!r}"]


def line_with(**values):
    return json.dumps(rollouts(1, 1)[0] | values)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"schema": 2}', "rollouts.jsonl:1=.*a rollout.*It lacks"),
        ("[1]", "rollouts.jsonl:1"),
        ('{"a": nonsense}', "rollouts.jsonl:1.*a line of JSON"),
        ('{"a": ' + "[" * 100_000 + "}", "rollouts.jsonl:1.*a line of JSON"),
        ('{"reward": NaN}', "rollouts.jsonl:1.*a line of JSON. NaN is no number of JSON, which has null"),
        (
            line_with(reward="high"),
            r"rollouts.jsonl:1.*a rollout. Expected `float \| null`, got `str` - at `\$.reward`",
        ),
        (line_with(log_probs=None), r"rollouts.jsonl:1.*a rollout. Expected `array`, got `null` - at `\$.log_probs`"),
        (
            line_with(log_probs=[]),
            r"rollouts.jsonl:1.*a rollout. It has \[\d+, 0, \d+\] tokens, log_probs and versions",
        ),
    ],
)
def test_a_line_that_is_no_rollout_is_refused_with_its_number(log, line, says):
    log.write_text(line + "\n")
    with pytest.raises(RequestError, match=says):
        read_jsonl(log)


def test_a_newer_schema_and_a_line_without_what_made_it_are_refused(policy, log):
    [sample, *_] = logged(policy, log)
    log.write_text(json.dumps({**sample, "schema": 2}) + "\n")
    with pytest.raises(RequestError, match="schema.*at most 1.*newer"):
        read_jsonl(log)
    del sample["sampling"]
    with pytest.raises(RequestError, match="log_to"):
        replay(policy, [sample])


GONE = object()
"""In place of a value: its key is missing."""
TELLS_THE_SAME = {"columns", "done", "ended_by", "engine", "episode_id", "error", "finish_reason", "group_id", "info"}
TELLS_THE_SAME |= {"made", "messages", "num_turns", "prompt", "response", "reward", "rewards", "sample_index", "schema"}
TELLS_THE_SAME |= {"seat", "terminated", "truncated", "turn_rewards", "weights"}
"""Keys of a line that decide no draw."""


def places_in(value, place=()):
    """Places of a line's values, of a list those of the first and last."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ends = [(key, each) for key, each in inside if isinstance(value, dict) or key in (0, len(value) - 1)]
    for key, each in ends:
        yield (*place, key)
        yield from places_in(each, (*place, key))


def altered(sample, place, value):
    changed = around = copy.deepcopy(sample)
    for key in place[:-1]:
        around = around[key]
    if value is GONE:
        del around[place[-1]]
    else:
        around[place[-1]] = value
    return changed


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "value",
    [GONE, None, "x", -1, 2**70, 10**400, [], {}, [[1]]],
    ids=lambda value: "gone" if value is GONE else f"{value!r:.10}",
)
def test_an_altered_line_is_refused_or_made_again_and_found_different(policy, log, value):
    params = SamplingParams(max_tokens=4, temperature=0.7, logit_bias={5: 1.0}, min_tokens=2)
    policy.rollout(None, params, env=Telling, max_turns=2, seed=5, log_to=log, use_tqdm=False)
    [sample] = read_jsonl(log)
    num_refused = 0
    for place in places_in(sample):
        changed = altered(sample, place, value)
        try:
            [report] = replay(policy, [changed])
        except RolloutEngineError:
            num_refused += 1
            continue
        is_same = place[0] in TELLS_THE_SAME or changed == sample or place[0] in ("sampling", "lora")
        assert is_same or not report.is_equal, place
    assert num_refused > 20
    with pytest.raises(RolloutEngineError):
        replay(policy, [value])


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_sampled(policy, tmp_path):
    with pytest.raises(RequestError, match=r"log_to=.*Make its folder first\.$"):
        logged(policy, tmp_path / "missing" / "rollouts.jsonl")


def test_the_command_makes_a_sample_again(policy, checkpoint, log, tmp_path, capsys):
    logged(policy, log)
    moved = str(other_weights(checkpoint, tmp_path / "moved"))
    policy.update_weights(moved)
    logged(policy, log)
    options = ["num_kv_blocks=1024", "max_model_len=256"]
    assert main(["replay", str(log), "--sample", "4", *options]) == 0
    assert "group 1, sample 1: " in (out := capsys.readouterr().out) and "equal to the bit" in out
    assert main(["replay", str(log), "--weights", moved, *options]) == 0
    assert "18 of 18 samples made again, equal to the bit" in capsys.readouterr().out
    assert main(["replay", str(log), "--model", moved, *options]) == 1
    out = capsys.readouterr().out
    assert "9 of 18 samples made again, equal to the bit" in out and "other weights: digest" in out
    assert main(["replay", str(log), "--sample", "18", *options]) == 2
    assert "--sample=18" in capsys.readouterr().err
    log.write_text(log.read_text().replace(json.dumps(str(checkpoint)), json.dumps(str(tmp_path / "gone"))))
    assert main(["replay", str(log), *options]) == 2
    assert "has no 'gone'. The lines name it so; --model says where it is now." in capsys.readouterr().err


def test_a_path_in_place_of_samples_is_refused():
    with pytest.raises(RequestError, match=r"samples='rollouts.jsonl' is not allowed: must be .*read_jsonl\(path\)"):
        replay(None, "rollouts.jsonl")
