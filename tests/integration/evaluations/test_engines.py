"""An evaluation is resumed by an engine that rounds weights as the first one did, and by no other."""

import json

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.base.errors import RequestError
from tests.integration.evaluations.sweeps import OPTIONS, ROWS, SETTINGS, evaluated


@pytest.mark.parametrize(("first", "second"), [(None, "int8"), ("int8", None)])
def test_another_quantization_is_refused_and_nothing_is_sampled(checkpoint, tmp_path, first, second):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS, quantization=first) as policy:
        evaluated(policy, out=tmp_path, num_samples=1)
        assert len(evaluated(policy, out=tmp_path).samples) == len(ROWS) * len(SETTINGS) * 3
    before = (tmp_path / "samples.jsonl").read_bytes()
    told = f"quantization={second!r} is not allowed: must be {first!r}, which sampled what is in"
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS, quantization=second) as policy:
        with pytest.raises(RequestError, match=told):
            evaluated(policy, out=tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_directory_of_an_older_version_was_sampled_without(checkpoint, tmp_path):
    def forget():
        plan = json.loads((tmp_path / "sweep.json").read_text())
        del plan["engine"]["quantization"]
        (tmp_path / "sweep.json").write_text(json.dumps(plan))

    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        evaluated(policy, out=tmp_path, num_samples=1)
        forget()
        assert len(evaluated(policy, out=tmp_path).samples) == len(ROWS) * len(SETTINGS) * 3
    forget()
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS, quantization="int8") as policy:
        with pytest.raises(RequestError, match="quantization='int8' is not allowed: must be None"):
            evaluated(policy, out=tmp_path)
