"""Proposals of engine options: what counts as faster, in which order rounds run, and what the file says."""

import json
from contextlib import contextmanager

import pytest

from rollout_engine import EngineConfig
from rollout_engine.cli import doctor, speed_paths, tune
from rollout_engine.cli.main import main
from rollout_engine.cli.tuning import Comparison, Trial, propose
from rollout_engine.testing import tiny_checkpoint


class Machine:
    """Stands for engines: rounds of options take as long as `rate` says, which sees the options and the round."""

    def __init__(self, rate):
        self.rate, self.log, self.num_up, self.most_up = rate, [], 0, 0

    @contextmanager
    def start(self, options):
        self.num_up += 1
        self.most_up = max(self.most_up, self.num_up)

        def one_round(i):
            self.log.append((dict(options), i))
            return self.rate(options, i)

        yield one_round
        self.num_up -= 1


def faster_with(**gains):
    """100 tokens per second, times the gain of each option that has another value than the default."""

    def rate(options, i):
        speed = 100.0 + i
        for name in options:
            speed *= gains.get(name, 1.0)
        return speed

    return rate


THREADS, SEQUENCES = Trial("num_threads", [1, 2], 4), Trial("max_num_seqs", [64], 256)


def test_what_is_faster_in_every_pair_is_proposed():
    found = propose([THREADS, SEQUENCES], Machine(faster_with(max_num_seqs=1.2)).start, 5)
    assert found.options == {"max_num_seqs": 64}
    assert found.together.options == {"max_num_seqs": 64} and found.together.ratio == pytest.approx(1.2)


def test_the_best_of_several_values_is_proposed():
    machine = Machine(lambda options, i: {1: 1.1, 2: 1.4}.get(options.get("num_threads"), 1.0))
    assert propose([THREADS], machine.start, 3).options == {"num_threads": 2}


def test_differences_within_the_noise_propose_the_default():
    """The median is 10 % above the default, but one pair says otherwise."""
    shaken = Machine(lambda options, i: 100.0 if not options else (90.0 if i == 3 else 110.0))
    found = propose([SEQUENCES], shaken.start, 5)
    [(_, [compared])] = found.trials
    assert compared.ratio == pytest.approx(1.1) and not compared.is_faster and not compared.is_slower
    assert found.options == {} and found.together is None
    tiny_gain = propose([SEQUENCES], Machine(faster_with(max_num_seqs=1.01)).start, 5)
    assert tiny_gain.options == {}


def test_winners_that_lose_together_are_not_proposed():
    machine = Machine(lambda options, i: {0: 100.0, 1: 120.0, 2: 90.0}[len(options)])
    found = propose([THREADS, SEQUENCES], machine.start, 5)
    assert len(found.together.options) == 2 and found.together.is_slower
    assert found.options == {}


def test_rounds_of_both_take_turns_and_the_first_changes():
    machine = Machine(faster_with())
    propose([SEQUENCES], machine.start, 4)
    assert machine.log[:2] == [({"max_num_seqs": 64}, 0), ({}, 0)]
    order = [("value" if options else "default", i) for options, i in machine.log[2:]]
    assert order == [
        ("value", 1),
        ("default", 1),
        ("default", 2),
        ("value", 2),
        ("value", 3),
        ("default", 3),
        ("default", 4),
        ("value", 4),
    ]
    assert (machine.most_up, machine.num_up) == (2, 0)


def test_when_the_time_is_up_the_rest_keeps_its_default():
    machine = Machine(faster_with(num_threads=2.0, max_num_seqs=2.0))
    found = propose([THREADS, SEQUENCES], machine.start, 1, is_over=lambda: len(machine.log) >= 4)
    assert [(trial.option, len(compared)) for trial, compared in found.trials] == [
        ("num_threads", 1),
        ("max_num_seqs", 0),
    ]
    assert found.trials[1][0].left_out == "the time was up" and found.options == {}


def test_the_file_has_what_won_with_its_figures_and_says_why_others_are_left_out(tmp_path):
    trials = [THREADS, SEQUENCES, Trial("max_num_batched_tokens", [], 8192, "all fit")]
    found = propose(trials, Machine(faster_with(max_num_seqs=1.5)).start, 3)
    given = {"dtype": "float32", "speculation": {"max_draft_tokens": 4, "draft_model": None}}
    path = tmp_path / "tuned.toml"
    path.write_text(tune.as_toml('a "model"\\path', "8x8, 64+64 tokens", given, found), encoding="utf-8")
    config = EngineConfig.load(path)
    assert (config.model, config.dtype, config.max_num_seqs) == ('a "model"\\path', "float32", 64)
    assert config.num_threads is None and config.speculation.max_draft_tokens == 4
    text = path.read_text()
    assert "max_num_seqs = 64  # 1.50 times (1.50 to 1.50 in 3 pairs): faster" in text
    assert "# num_threads: the default (4), 1 is 1.00 times" in text
    assert "# max_num_batched_tokens: the default (8192), not tried: all fit" in text


def test_a_comparison_is_judged_by_its_pairs():
    drifting = Comparison({}, [110.0, 55.0, 22.0], [100.0, 50.0, 20.0])  # the machine slows down under both
    assert drifting.ratios == pytest.approx([1.1, 1.1, 1.1]) and drifting.is_faster


def test_tune_measures_a_real_model_and_writes_a_file_that_loads(tmp_path, capsys):
    model, out = str(tiny_checkpoint(tmp_path / "model")), tmp_path / "tuned.toml"
    small = ("--prompts", "2", "--prompt-tokens", "4", "--rounds", "1", "n=2", "max_tokens=4", "num_kv_blocks=64")
    assert main(["tune", model, "--json", "--out", str(out), *small, "num_threads=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name for each in found["compared"] for name in each["options"]} == {"speculation"}
    assert all(min(each["rates"] + each["default_rates"]) > 0 for each in found["compared"])
    assert set(found["not_tried"]) == {"max_num_batched_tokens", "max_num_seqs"}
    config = EngineConfig.load(out)
    assert (config.model, config.num_threads, config.num_kv_blocks) == (model, 1, 64)
    assert ("speculation" in found["options"]) == (config.speculation == "auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds=0 is not allowed: must be above 0"),
        (["--seconds", "nan"], "--seconds=nan is not allowed"),
        (["device=cuda"], "so far only on a CPU"),
        (["max_tokens=null"], "max_tokens=None is not allowed"),
        (["max_num_seq=4"], "Did you mean 'max_num_seqs'?"),
    ],
)
def test_mistakes_of_tune_are_answered_in_one_line(capsys, arguments, message):
    assert main(["tune", "nowhere", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_tells_what_falls_back_and_how_to_fix_it(monkeypatch, capsys):
    monkeypatch.setattr("rollout_engine.cli.machine.usable_cpus", lambda: 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 1.0, 1.0))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    paths = {path["what"]: path for path in found["paths"]}
    assert paths["threads"]["state"] == "falls back" and "set num_threads" in paths["threads"]["fix"]
    assert paths["waiting threads"]["how"] == "they spin, and the machine's load is 9.0"
    assert "OMP_WAIT_POLICY=PASSIVE" in paths["waiting threads"]["fix"]
    assert paths["waiting threads"]["fix"] in found["advice"]
    lines = speed_paths.table([speed_paths.SpeedPath(**paths["threads"])]).splitlines()
    assert lines[0].startswith("falls back  threads") and lines[1].split()[:2] == ["->", "There"]


def test_doctor_names_the_command_for_an_extra_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "_extras", lambda: {"math-verify": {"math-verify": False}, "view": {"rich": True}})
    _, paths = doctor._examine()
    [missing] = [path for path in paths if path.what.startswith("extra")]
    assert (missing.what, missing.fix) == ("extra math-verify", 'pip install "rollout-engine[math-verify]"')


def test_doctor_loads_a_model_and_tells_how_its_layers_run(tmp_path, monkeypatch):
    model = str(tiny_checkpoint(tmp_path / "model"))
    [layers] = speed_paths.of_model(model, {"num_kv_blocks": 64})
    assert layers.state == "fast" and layers.how.startswith("run in one call. ")
    reason = "its embedding is more than a table"
    monkeypatch.setattr("rollout_engine.model.cpu.decoder_trial.unsupported_reason", lambda *parts: reason)
    layers, why = speed_paths.of_model(model, {"num_kv_blocks": 64})
    assert layers.state == "falls back" and why.how == f"The layers run as modules, more slowly: {reason}."
