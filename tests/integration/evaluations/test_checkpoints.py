"""Evaluations of several checkpoints, of adapters, and of a policy whose weights move meanwhile."""

import json
import os
import shutil

import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, Sweep, replay
from rollout_engine.base.errors import RequestError
from rollout_engine.rollouts.evaluation.sweep import seed_of
from rollout_engine.testing import random_adapter, tiny_model
from tests.integration.evaluations.sweeps import OPTIONS, ROWS, SETTINGS, TASK, essence, evaluated, has_letter, row_of
from tests.integration.test_replay import other_weights


def test_a_sweep_over_checkpoints_has_paired_differences(policy, checkpoint, moved, tmp_path):
    names = {"first": str(checkpoint), "second": str(moved[0]), "third": str(moved[1])}
    report = evaluated(policy, sweep=Sweep(settings=SETTINGS, checkpoints=names), out=tmp_path / "out")
    assert report.checkpoints == list(names)
    assert len(report.samples) == 3 * 2 * 4 * 3
    pairs = {(row["baseline"], row["checkpoint"]) for row in report.differences}
    assert pairs == {("first", "second"), ("first", "third"), ("second", "third")}
    for row in report.differences:
        a, b = (
            row_of(report, row["metric"], checkpoint=row[w], setting=row["setting"]) for w in ("baseline", "checkpoint")
        )
        assert row["value"] == pytest.approx(b["value"] - a["value"])
        assert 0 < row["p_value"] <= 1
    seeds = {name: [s["seed"] for s in report.samples if s["evaluation"]["checkpoint"] == name] for name in names}
    assert seeds["first"] == seeds["second"] == seeds["third"]
    digests = {tuple(s["weights"].values()) for s in report.samples}
    assert len(digests) == 3 and all(len(each) == 1 for each in digests)


def test_versions_of_a_live_policy_are_named_and_said(policy, moved, tmp_path):
    evaluated(policy, out=tmp_path)
    policy.update_weights(str(moved[0]))
    report = evaluated(policy, out=tmp_path)
    assert report.checkpoints == ["version 0", "version 1"]
    assert row_of(report, "mean", checkpoint="version 1", setting="hot")["versions"] == [1]
    assert report.differences


def test_updates_meanwhile_are_seen_in_the_report(policy, checkpoint, moved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(moved[0])
    updated = []

    def update_once(completions, letter):
        if not updated:
            updated.append(policy.update_weights(model))
        return has_letter(completions, letter)

    rows = [row | {"prompt": f"{row['prompt']} {i}"} for i in range(8) for row in ROWS]
    report = evaluated(policy, TASK.clone(rows=rows, reward_fn=update_once))
    assert row_of(report, "mean", setting="cool")["versions"] in ([0, 1], [1])
    versions = {version for sample in report.samples for version in sample["policy_version"]}
    assert versions == {0, 1}


def test_other_weights_under_a_name_are_refused(policy, checkpoint, moved, tmp_path):
    os.symlink(moved[0], tmp_path / "weights")
    sweep = {"settings": SETTINGS, "checkpoints": {"best": str(tmp_path / "weights")}}
    evaluated(policy, out=tmp_path / "out", sweep=sweep, num_samples=1)
    os.unlink(tmp_path / "weights")
    os.symlink(moved[1], tmp_path / "weights")
    with pytest.raises(RequestError, match="checkpoints\\['best'\\].*Its weights were others"):
        evaluated(policy, out=tmp_path / "out", sweep=sweep, num_samples=2)


def test_other_weights_are_refused_though_no_sample_is_missing(policy, moved, tmp_path):
    """In the same files, by another path under the same name, and as the live weights of another policy."""
    saved = {"settings": SETTINGS, "checkpoints": {"best": str(tmp_path / "saved")}}
    shutil.copytree(moved[0], tmp_path / "saved")
    os.symlink("nowhere", tmp_path / "saved" / "a link to nothing")
    before = evaluated(policy, out=tmp_path / "same", sweep=saved)
    version = policy.policy_version
    assert evaluated(policy, out=tmp_path / "same", sweep=saved).table == before.table
    assert policy.policy_version == version  # nothing was loaded
    os.utime(tmp_path / "saved" / "model.safetensors")
    assert evaluated(policy, out=tmp_path / "same", sweep=saved).table == before.table
    shutil.copytree(moved[1], tmp_path / "saved", dirs_exist_ok=True)
    with pytest.raises(RequestError, match="checkpoints\\['best'\\].*Its weights were others"):
        evaluated(policy, out=tmp_path / "same", sweep=saved)
    sweeps = [{"settings": SETTINGS, "checkpoints": {"best": str(path)}} for path in moved]
    first = evaluated(policy, out=tmp_path / "named", sweep=sweeps[0])
    with pytest.raises(RequestError, match="checkpoints\\['best'\\].*Its weights were others"):
        evaluated(policy, out=tmp_path / "named", sweep=sweeps[1])
    os.symlink(moved[0], tmp_path / "link")
    again = {"settings": SETTINGS, "checkpoints": {"best": str(tmp_path / "link")}}
    assert evaluated(policy, out=tmp_path / "named", sweep=again).table == first.table
    for path, is_first in ((moved[0], True), (moved[1], False)):
        with RolloutPolicy.from_pretrained(path, **OPTIONS) as other:
            if is_first:
                evaluated(other, out=tmp_path / "live")
            else:
                with pytest.raises(RequestError, match="checkpoints\\['version 0'\\].*Its weights were others"):
                    evaluated(other, out=tmp_path / "live")


def test_a_checkpoint_that_is_gone_is_named_before_anything_is_sampled(policy, moved, tmp_path):
    sweep = {"settings": SETTINGS, "checkpoints": [str(moved[0]), str(tmp_path / "gone")]}
    with pytest.raises(RequestError, match="gone.*a path that exists"):
        evaluated(policy, sweep=sweep, out=tmp_path / "out")
    assert (tmp_path / "out" / "samples.jsonl").stat().st_size == 0


def test_a_checkpoint_that_is_gone_is_not_missed_once_it_is_measured(policy, checkpoint, tmp_path):
    weights = other_weights(checkpoint, tmp_path / "weights", 5)
    sweep = {"settings": SETTINGS, "checkpoints": {"old": str(weights)}}
    first = evaluated(policy, sweep=sweep, out=tmp_path / "out")
    weights.rename(tmp_path / "elsewhere")
    assert evaluated(policy, sweep=sweep, out=tmp_path / "out").table == first.table


def test_adapters_are_checkpoints_over_the_live_weights(policy, tmp_path):
    ours, other = (random_adapter(tiny_model(), name, seed=seed) for name, seed in (("ours", 1), ("other", 2)))
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "adapter_config.json").write_text(json.dumps(other.sendable().config))
    save_file(
        {name: tensor.contiguous() for name, tensor in other.tensors.items()}, saved / "adapter_model.safetensors"
    )
    sweep = {"settings": SETTINGS, "checkpoints": {"ours": ours, "saved": saved}}
    report = evaluated(policy, sweep=sweep, out=tmp_path / "out", seed=7)
    assert policy.list_loras() == [] and policy.policy_version == 0
    policy.add_lora(ours)
    for name, settings in SETTINGS.items():
        options = dict(num_samples=3, seed=seed_of(7, "letters", name), lora_request="ours", use_tqdm=False)
        batch = policy.rollout([row["prompt"] for row in ROWS], settings, **options)
        found = [
            s for s in report.samples if (s["evaluation"]["checkpoint"], s["evaluation"]["setting"]) == ("ours", name)
        ]
        assert [s["response"] for s in found] == [batch["text", "response"][i] for i in range(12)]
    assert {s["lora"]["name"] for s in report.samples} == {"ours", "saved"}
    tokens = {name: [s["response"] for s in report.samples if s["lora"]["name"] == name] for name in ("ours", "saved")}
    assert tokens["ours"] != tokens["saved"]
    assert essence(evaluated(policy, sweep=sweep, out=tmp_path / "out", seed=7).samples) == essence(report.samples)
    assert all(each.is_equal for each in replay(policy, [s for s in report.samples if s["lora"]["name"] == "ours"]))
