"""The command `eval`, and what is left of it when it is killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_engine import EvalReport, read_jsonl
from rollout_engine.cli.main import main
from rollout_engine.testing import tiny_checkpoint
from tests.integration.evaluations.sweeps import essence
from tests.integration.test_replay import other_weights

NUM_PROMPTS, NUM_SAMPLES = 24, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two checkpoints, rows, a reward function and a sweep file."""
    folder = tmp_path_factory.mktemp("sweep")
    checkpoint = tiny_checkpoint(folder / "model")
    other_weights(checkpoint, folder / "moved")
    rows = [{"prompt": f"row {i}", "letter": "etaoin"[i % 6]} for i in range(NUM_PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letter_rewards.py").write_text(
        "def has_letter(completions, letter):\n"
        "    return [float(each in text) for text, each in zip(completions, letter, strict=True)]\n"
    )
    (folder / "sweep.toml").write_text(f"""
model = "{checkpoint}"
out = "out"
num_samples = {NUM_SAMPLES}
k = [1, {NUM_SAMPLES}]
checkpoints = {{ first = "{checkpoint}", second = "{folder / "moved"}" }}
[engine]
dtype = "float32"
num_kv_blocks = 512
max_model_len = 256
max_num_seqs = 16
[settings.hot]
max_tokens = 24
[settings.cool]
max_tokens = 24
temperature = 0.5
[[tasks]]
rows = "{folder / "rows.jsonl"}"
reward_fn = "letter_rewards:has_letter"
""")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    assert main(["eval", str(folder / "sweep.toml"), f"out={out}"]) == 0
    return out


def test_the_command_writes_samples_tables_and_a_page(undisturbed):
    report = EvalReport.read(undisturbed)
    assert len(report.samples) == 2 * 2 * NUM_PROMPTS * NUM_SAMPLES
    lines = [json.loads(line) for line in (undisturbed / "table.jsonl").read_text().splitlines()]
    assert lines == report.table + report.differences
    assert (undisturbed / "samples.parquet").stat().st_size > 0
    assert "</html>" in (undisturbed / "report.html").read_text(encoding="utf-8")


def test_the_command_prints_one_json_object(folder, undisturbed, capsys):
    assert main(["eval", str(folder / "sweep.toml"), f"out={undisturbed}", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["table"] == EvalReport.read(undisturbed).table


def test_the_command_tells_a_misspelt_key_with_its_line(folder, tmp_path, capsys):
    text = (folder / "sweep.toml").read_text().replace("reward_fn", "reward_fun")
    (tmp_path / "sweep.toml").write_text(text)
    assert main(["eval", str(tmp_path / "sweep.toml")]) == 2
    assert "sweep.toml:19: Unknown key of [tasks] 'reward_fun'. Did you mean 'reward_fn'?" in capsys.readouterr().err


def killed_at(folder, out, num_bytes):
    """Run the command and kill it as soon as its ledger has so many bytes; False where it ended before."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rollout_engine", "eval", str(folder / "sweep.toml"), f"out={out}"]
    with open(out.parent / "output.txt", "w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        path = out / "samples.jsonl"
        while process.poll() is None:
            if path.exists() and path.stat().st_size >= num_bytes:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        return process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def kill_once(folder, undisturbed, out, seed):
    """Kill one evaluation at a random moment, and complete it."""
    size = (undisturbed / "samples.jsonl").stat().st_size
    moment = random.Random(seed).randrange(1, size * 9 // 10)
    assert killed_at(folder, out, moment), (out.parent / "output.txt").read_text()
    samples = read_jsonl(out / "samples.jsonl")
    assert len({repr(each[:3]) for each in essence(samples)}) == len(samples) > 0
    before = (out / "samples.jsonl").read_bytes().rpartition(b"\n")[0]
    assert main(["eval", str(folder / "sweep.toml"), f"out={out}"]) == 0
    assert (out / "samples.jsonl").read_bytes().startswith(before)
    resumed, whole = EvalReport.read(out), EvalReport.read(undisturbed)
    assert len(read_jsonl(out / "samples.jsonl")) == len(whole.samples)
    assert essence(resumed.samples) == essence(whole.samples)
    assert resumed.table == whole.table and resumed.differences == whole.differences


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_to_the_same_samples(folder, undisturbed, tmp_path):
    kill_once(folder, undisturbed, tmp_path / "out", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_kills_at_random_moments_change_nothing(folder, undisturbed, tmp_path, seed):
    kill_once(folder, undisturbed, tmp_path / "out", seed)
