"""The core over a loaded model, which engines in this process and in one of their own make by one function."""

import msgspec

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine.start_up import make_core
from tests.unit.fake_engine import FakeModel


def test_the_core_has_the_executor_prepare_each_request():
    asked, executor = [], FakeModel()
    executor.info = msgspec.structs.replace(executor.info, max_prefill_beside_decode=16)
    executor.prepare_grammar = asked.append  # returns None: nothing to wait for
    core = make_core(executor.info.config, executor)
    params = SamplingParams(max_tokens=1)
    core.add_request(EngineCoreRequest(prompt_token_ids=[5], params=params, max_tokens=1, seed=1, first_sequence_id=0))
    assert asked == [params]
