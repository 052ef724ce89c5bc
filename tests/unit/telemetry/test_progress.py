"""The progress bar of a call: where it cannot be shown the call goes on."""

import io
import sys

import pytest

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.telemetry import progress
from rollout_engine.telemetry.progress import ProgressBar


class Terminal(io.StringIO):
    """A terminal that goes away after some writes."""

    def __init__(self, num_writes):
        super().__init__()
        self.num_writes = num_writes

    def write(self, text):
        self.num_writes -= 1
        if self.num_writes < 0:
            raise BrokenPipeError("the terminal is gone")
        return super().write(text)


def test_it_counts_and_shows_the_speed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(1000))
    with ProgressBar(2, desc="generate", unit="prompt", shown=True) as bar:
        bar.update(10)
        bar.update(10)
    assert "generate: 100%" in sys.stderr.getvalue() and "2/2" in sys.stderr.getvalue()
    assert "20 tokens, " in sys.stderr.getvalue() and " tokens/s" in sys.stderr.getvalue()


def test_it_begins_with_what_was_complete_before_and_shows_another_description(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(1000))
    with ProgressBar(5, desc="evaluate", unit="group", shown=True, num_done=3) as bar:
        bar.describe("evaluate step-20")
        assert "evaluate step-20:" in sys.stderr.getvalue() and "3/5" in sys.stderr.getvalue()


def test_it_counts_tokens_of_what_is_not_complete_yet(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(1000))
    monkeypatch.setattr(progress, "REFRESH_SECONDS", -1.0)
    with ProgressBar(2, desc="rollout", unit="group", shown=True) as bar:
        bar.count(lambda: 7)
        assert "0/2" in sys.stderr.getvalue() and ", 7 tokens, " in sys.stderr.getvalue()
        bar.update(1000)
        bar.count(lambda: 234)
        assert "1/2" in sys.stderr.getvalue() and ", 1,234 tokens, " in sys.stderr.getvalue()


def test_between_two_looks_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(1000))
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 1000.0)
    with ProgressBar(2, desc="rollout", unit="group", shown=True) as bar:
        bar.count(pytest.fail)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", -1.0)
    with ProgressBar(2, desc="rollout", unit="group", shown=False) as bar:
        bar.count(pytest.fail)


def test_generate_shows_tokens_before_the_first_prompt_is_complete(make_llm, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(1000))
    monkeypatch.setattr(progress, "REFRESH_SECONDS", -1.0)
    make_llm().generate([[5], [6]], SamplingParams(max_tokens=3, n=2))
    shown = sys.stderr.getvalue()
    assert "0/2 [" in shown and ", 4 tokens, " in shown and ", 12 tokens, " in shown


@pytest.mark.parametrize("num_writes", range(4))
def test_a_terminal_that_goes_away_costs_no_result_and_one_warning(make_llm, monkeypatch, caplog, num_writes):
    llm = make_llm()
    monkeypatch.setattr(sys, "stderr", Terminal(num_writes))
    outputs = llm.generate([[5], [6], [7]], SamplingParams(max_tokens=3))
    assert len(outputs) == 3
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["the progress bar is left out: BrokenPipeError: the terminal is gone"]
