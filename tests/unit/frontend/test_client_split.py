"""Clients of one core are kept apart by number and by name."""

import msgspec
import numpy as np
import pytest

from rollout_engine.errors import RequestError
from rollout_engine.frontend.client_split import ids_of_client, inner_id, inner_request, split
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.sampling_params import SamplingParams

SECOND = 1 << 40


def make_request(first_sequence, n=1):
    params = SamplingParams(n=n)
    return EngineCoreRequest(
        request_id="a", prompt_token_ids=[3], params=params, max_tokens=1, seed=0, first_sequence=first_sequence
    )


def test_equal_names_and_numbers_of_two_clients_differ_inside():
    ours, theirs = (inner_request(client, make_request(7)) for client in (0, 1))
    assert (ours.request_id, theirs.request_id) == ("a:0", "a:1")
    assert (ours.first_sequence, theirs.first_sequence) == (7, SECOND + 7)
    assert inner_id(1, "0_a") == f"0_{theirs.request_id}"
    assert ids_of_client(1, ["a:0", "a:1", "b:11", "x:1:0"]) == ["a:1"]


@pytest.mark.parametrize("first", [-1, SECOND - 1, SECOND, 2**70])
def test_sequence_numbers_of_others_are_refused(first):
    with pytest.raises(RequestError, match="first_sequence"):
        inner_request(0, make_request(first, n=2))


def test_each_client_gets_its_own_columns():
    outputs = EngineCoreOutputs(
        policy_version=4,
        sequences=[SECOND, 3, SECOND + 2],
        token_ids=[10, 11, 12],
        kv_min_versions=[1, 2, 3],
        logprobs=[-1.0, -2.0, -3.0],
        top_logprobs=(np.array([[1], [2], [3]], np.int32), np.array([[0.1], [0.2], [0.3]], np.float32)),
        ended=[SequenceEnd(SECOND + 2, "stop"), SequenceEnd(3, "length")],
        num_cached_tokens={SECOND: 16},
        start_time=9.0,
        prompt_logprobs={SECOND: "theirs", 3: "ours"},
    )
    shares = split(outputs)
    assert sorted(shares) == [0, 1]
    first, second = shares[0], shares[1]
    assert (first.sequences, first.token_ids, first.kv_min_versions, first.logprobs) == ([3], [11], [2], [-2.0])
    assert (second.sequences, second.token_ids, second.logprobs) == ([0, 2], [10, 12], [-1.0, -3.0])
    assert second.top_logprobs[0].tolist() == [[1], [3]] and first.kept_logprob_mass is None
    assert second.ended == [SequenceEnd(2, "stop")] and first.ended == [SequenceEnd(3, "length")]
    assert (first.num_cached_tokens, second.num_cached_tokens) == ({}, {0: 16})
    assert (first.prompt_logprobs, second.prompt_logprobs) == ({3: "ours"}, {0: "theirs"})
    assert {share.policy_version for share in shares.values()} == {4} and first.start_time == 9.0


def test_no_field_of_the_outputs_is_forgotten():
    names = {"policy_version", "sequences", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass"}
    names |= {"top_logprobs", "ended", "num_cached_tokens", "start_time", "prompt_logprobs"}
    assert {field.name for field in msgspec.structs.fields(EngineCoreOutputs)} == names


def test_one_client_alone_gets_the_outputs_as_they_are():
    outputs = EngineCoreOutputs(0, [1, 2], [5, 6], [0, 0])
    assert split(outputs)[0] is outputs
