"""Records: arrays and numbers return with their bits, and nothing else is decoded."""

import msgspec
import numpy as np
import pytest

from rollout_engine.base.outputs import CompletionOutput, VersionSpan
from rollout_engine.rollouts.journal.group_records import RECORDS, Progress
from rollout_engine.rollouts.journal.records import RecordError

SAMPLE = CompletionOutput(
    index=1,
    text="é",
    token_ids=[1, 2**31 - 1],
    logprobs=np.array([-0.1, -np.inf], np.float32),
    top_logprobs=(np.arange(6, dtype=np.int32).reshape(2, 3), np.full((2, 3), -0.3, np.float32)),
    cumulative_logprob=-0.1,
    kept_logprob_mass=np.zeros(0, np.float32),
    finish_reason="stop",
    stop_reason="x",
    version_spans=[VersionSpan(0, 2, 3, 1)],
    seed=2**64 - 1,
    routed_experts=np.arange(24, dtype=np.uint8).reshape(3, 4, 2),
    support=(np.array([0, 2, 2], np.int64), np.array([5, 9], np.int32)),
    forced=np.array([True, False]),
)


def test_a_record_returns_with_every_bit():
    [part] = RECORDS.decode(RECORDS.encode(Progress(7, [SAMPLE]))).parts
    for name in CompletionOutput.__struct_fields__:
        made, given = getattr(part, name), getattr(SAMPLE, name)
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (made, given)), strict=True):
            if isinstance(other, np.ndarray):
                assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
                one[...] = one  # it may be written to, like the engine's own
            else:
                assert one == other


@pytest.mark.parametrize("value", [object(), np.array(["text"]), np.array([1j])])
def test_a_value_without_a_form_is_not_written(value):
    part = msgspec.structs.replace(SAMPLE, logprobs=value)
    with pytest.raises(TypeError, match="has no form in a journal"):
        RECORDS.encode(Progress(0, [part]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "unheard of"}),
        msgspec.msgpack.encode({"type": "progress", "index": "one", "parts": []}),
        msgspec.msgpack.encode({"type": "complete", "index": 1, "total": msgspec.msgpack.Ext(9, b"abc")}),
        RECORDS.encode(Progress(0, [SAMPLE])) + b"\0",
    ],
)
def test_anything_but_a_record_is_refused(payload):
    with pytest.raises(RecordError):
        RECORDS.decode(payload)
