"""Clients of one core are kept apart by the numbers of their sequences."""

import msgspec
import numpy as np
import pytest

from rollout_engine.errors import RequestError
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs, SequenceEnd
from rollout_engine.process.client_routing import check_sequences, first_sequence_of, sequences_of_client, split
from rollout_engine.sampling_params import SamplingParams

SECOND = 1 << 40


def make_request(first, n=1):
    params = SamplingParams(n=n)
    return EngineCoreRequest(prompt_token_ids=[3], params=params, max_tokens=1, seed=0, first_sequence_id=first)


def test_each_client_counts_from_a_number_of_its_own():
    assert [first_sequence_of(client) for client in range(3)] == [0, SECOND, 2 * SECOND]
    assert sequences_of_client(1, [7, SECOND, -1, SECOND + 7, 2 * SECOND, 1 << 70]) == [SECOND, SECOND + 7]


def test_a_client_may_use_all_its_numbers():
    check_sequences(0, make_request(0))
    check_sequences(1, make_request(2 * SECOND - 2, n=2))


@pytest.mark.parametrize("first", [-1, SECOND - 1, SECOND, 2**70])
def test_sequence_numbers_of_others_are_refused(first):
    with pytest.raises(RequestError, match=rf"first_sequence_id={first} .* in \[0 \* 2\*\*40, .* client 0's own"):
        check_sequences(0, make_request(first, n=2))


def test_each_client_gets_its_own_columns():
    outputs = EngineCoreOutputs(
        policy_version=4,
        sequence_ids=[SECOND, 3, SECOND + 2],
        token_ids=[10, 11, 12],
        kv_min_versions=[1, 2, 3],
        logprobs=[-1.0, -2.0, -3.0],
        top_logprobs=(np.array([[1], [2], [3]], np.int32), np.array([[0.1], [0.2], [0.3]], np.float32)),
        ended=[SequenceEnd(SECOND + 2, "stop"), SequenceEnd(3, "length")],
        num_cached_tokens={SECOND: 16},
        start_time=9.0,
        prompt_logprobs={SECOND: "theirs", 3: "ours"},
        pooled={7: "mine", SECOND + 9: "yours"},
        sampled_ranks=np.array([1, 2, 3], np.int32),
        id_logprobs=IdLogprobs.of({3: np.float32([-1.5]), SECOND + 2: np.float32([-2.5, -3.5])}),
    )
    shares = split(outputs)
    assert sorted(shares) == [0, 1]
    first, second = shares[0], shares[1]
    assert (first.sequence_ids, first.token_ids, first.kv_min_versions, first.logprobs) == ([3], [11], [2], [-2.0])
    assert (second.sequence_ids, second.token_ids, second.logprobs) == ([SECOND, SECOND + 2], [10, 12], [-1.0, -3.0])
    assert second.top_logprobs[0].tolist() == [[1], [3]] and first.kept_logprob_mass is None
    assert (first.sampled_ranks.tolist(), second.sampled_ranks.tolist()) == ([2], [1, 3])
    shown = [{s: row.tolist() for s, row in share.id_logprobs.rows()} for share in (first, second)]
    assert shown == [{3: [-1.5]}, {SECOND + 2: [-2.5, -3.5]}]
    assert second.ended == [SequenceEnd(SECOND + 2, "stop")] and first.ended == [SequenceEnd(3, "length")]
    assert (first.num_cached_tokens, second.num_cached_tokens) == ({}, {SECOND: 16})
    assert (first.prompt_logprobs, second.prompt_logprobs) == ({3: "ours"}, {SECOND: "theirs"})
    assert (first.pooled, second.pooled) == ({7: "mine"}, {SECOND + 9: "yours"})
    assert {share.policy_version for share in shares.values()} == {4} and first.start_time == 9.0


def test_no_field_of_the_outputs_is_forgotten():
    names = {"policy_version", "sequence_ids", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass"}
    names |= {"top_logprobs", "ended", "num_cached_tokens", "start_time", "prompt_logprobs"}
    names |= {"sampled_ranks", "id_logprobs", "pooled"}
    assert {field.name for field in msgspec.structs.fields(EngineCoreOutputs)} == names


def test_one_client_alone_gets_the_outputs_as_they_are():
    for client in (0, 1):
        outputs = EngineCoreOutputs(0, [client * SECOND + 1, client * SECOND + 2], [5, 6], [0, 0])
        assert split(outputs)[client] is outputs
