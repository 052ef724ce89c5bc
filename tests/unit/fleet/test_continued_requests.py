"""A request that began in an earlier process keeps the tokens that it had when its replica is lost, too."""

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.fleet.plan.ledger import Ledger


def test_tokens_of_an_earlier_process_precede_those_of_the_lost_replica():
    ledger = Ledger()
    request = EngineCoreRequest(
        prompt_token_ids=[5, 6],
        params=SamplingParams(ignore_eos=True),
        max_tokens=5,
        seed=3,
        first_sequence_id=7,
        output_token_ids=[8, 9],
    )
    entry = ledger.add(request)
    entry.replica = 0
    assert ledger.rest(entry) == ([request], [])
    for token_id, rest in ((10, [8, 9, 10]), (11, [8, 9, 10, 11])):
        ledger.record_outputs(0, EngineCoreOutputs(0, [7], [token_id], [0]))
        [continued], ends = ledger.rest(entry)
        assert continued.output_token_ids == rest and continued.seed == 3 and not ends
    ledger.record_outputs(0, EngineCoreOutputs(0, [7], [12], [0]))
    requests, [end] = ledger.rest(entry)
    assert not requests and end.finish_reason == "length"
    ledger.check_integrity()
