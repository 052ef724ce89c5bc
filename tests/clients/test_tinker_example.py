"""examples/tinker_train.py learns by shown answers, and by rewards for sampled ones."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("tinker")

from rollout_engine.rollouts.tinker import lora_trainer  # noqa: E402
from rollout_engine.serve.options import ServeOptions  # noqa: E402
from rollout_engine.serve.server import HttpServer  # noqa: E402


def test_the_example_learns(policy, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    options = ServeOptions(port=0, served_model_name="tiny", tinker=str(tmp_path))
    with HttpServer(policy, options, lora_trainer(policy)) as server:
        for name, value in {"API_KEY": "tml-any", "BASE_URL": server.url, "TELEMETRY": "0"}.items():
            monkeypatch.setenv(f"TINKER_{name}", value)
        history = importlib.import_module("tinker_train").main(["--model", "tiny"])
    first, last = (sum(part) / 5 for part in (history["reward"][:5], history["reward"][-5:]))
    assert history["nll"][-1] < 0.5 * history["nll"][0]
    assert last > first + 0.1
    assert set(history["difference"]) == {0.0}  # of every step
