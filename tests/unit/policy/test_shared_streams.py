"""Rollouts that share an engine in another process: each hears of its own requests alone."""

import pytest

from rollout_engine.errors import EngineGenerateError
from rollout_engine.frontend.blocking_engine import SharedStreams
from rollout_engine.outputs import CompletionOutput, RequestOutput
from rollout_engine.rollout_plan import RolloutPlan
from rollout_engine.rollout_run import RolloutRun


class Remote:
    """Stands for a `RemoteEngine`: every request has at once what its prompt says, an error or a finished result."""

    def __init__(self):
        self.num_requests = 0

    def add_requests(self, prompts, params, wake):
        streams = [FakeStream(f"request-{self.num_requests + i}", prompt) for i, prompt in enumerate(prompts)]
        self.num_requests += len(prompts)
        for stream in streams:
            wake(stream)
        return streams

    def take(self, stream):
        if stream.prompt == "bad":
            raise EngineGenerateError(f"{stream.request_id} failed")
        sample = CompletionOutput(0, "text", [1], None, None, None, None, "stop", None, [], 0)
        return RequestOutput(stream.request_id, stream.prompt, [1], None, [sample], True, 0)

    def close(self, stream):
        pass


class FakeStream:
    def __init__(self, request_id, prompt):
        self.request_id, self.prompt = request_id, prompt


def run_to_its_end(shared, prompts):
    run, groups = RolloutRun(shared, RolloutPlan.of(prompts), None), []
    try:
        while run.unfinished:
            groups += run.advance()
    finally:
        run.close()
    return groups


def test_a_valid_rollout_does_not_hear_of_one_that_failed():
    shared = SharedStreams(Remote())
    for _ in range(20):
        with pytest.raises(EngineGenerateError, match="failed"):
            run_to_its_end(shared, ["bad", "bad"])
        assert len(run_to_its_end(shared, ["good", "good"])) == 2
