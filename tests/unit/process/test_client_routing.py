"""Clients of one core are kept apart by the numbers of their sequences."""

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.sequence_rows import SupportIds
from rollout_engine.process.client_routing import (
    check_sequences,
    first_sequence_of,
    halves,
    sequences_of_client,
    split,
)

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
        routed_experts=np.arange(6, dtype=np.uint8).reshape(3, 1, 2),
        prompt_routed_experts={SECOND: "experts"},
        entropies=np.array([1, 2, 3], np.float32),
        hidden_states=np.arange(6, dtype=np.int16).reshape(3, 2),
        prompt_hidden_states={3: "states"},
        supports=SupportIds.of({3: np.int32([]), SECOND: np.int32([4, 9])}),
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
    assert (first.routed_experts.tolist(), second.routed_experts.tolist()) == ([[[2, 3]]], [[[0, 1]], [[4, 5]]])
    assert (first.prompt_routed_experts, second.prompt_routed_experts) == ({}, {SECOND: "experts"})
    assert (first.entropies.tolist(), second.entropies.tolist()) == ([2], [1, 3])
    assert (first.hidden_states.tolist(), second.hidden_states.tolist()) == ([[2, 3]], [[0, 1], [4, 5]])
    shown = [{s: row.tolist() for s, row in share.supports.rows()} for share in (first, second)]
    assert shown == [{3: []}, {SECOND: [4, 9]}]
    assert (first.prompt_hidden_states, second.prompt_hidden_states) == ({3: "states"}, {})
    assert (first.pooled, second.pooled) == ({7: "mine"}, {SECOND + 9: "yours"})
    assert {share.policy_version for share in shares.values()} == {4} and first.start_time == 9.0


def test_no_field_of_the_outputs_is_forgotten():
    names = {"policy_version", "sequence_ids", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass"}
    names |= {"top_logprobs", "ended", "num_cached_tokens", "start_time", "prompt_logprobs"}
    names |= {"sampled_ranks", "id_logprobs", "pooled", "routed_experts", "prompt_routed_experts"}
    names |= {"entropies", "hidden_states", "prompt_hidden_states"}
    names |= {"supports"}
    assert {field.name for field in msgspec.structs.fields(EngineCoreOutputs)} == names


def test_one_client_alone_gets_the_outputs_as_they_are():
    for client in (0, 1):
        outputs = EngineCoreOutputs(0, [client * SECOND + 1, client * SECOND + 2], [5, 6], [0, 0])
        assert split(outputs)[client] is outputs


def parts_of(outputs):
    """The outputs divided as often as they can be."""
    parts = halves(outputs)
    return parts if len(parts) == 1 else [part for half in parts for part in parts_of(half)]


def test_outputs_that_are_divided_say_everything_once_and_of_a_prompt_no_later_than_its_tokens():
    outputs = EngineCoreOutputs(
        4,
        [5, 6, 7],
        [10, 11, 12],
        [1, 2, 3],
        ended=[SequenceEnd(5, "stop"), SequenceEnd(7, "length")],
        num_cached_tokens={5: 16, 6: 0},
        prompt_logprobs={5: "a", 6: "b"},
        pooled={8: "p", 9: "q"},
        routed_experts=np.arange(6, dtype=np.uint8).reshape(3, 1, 2),
        prompt_routed_experts={5: "x", 6: "y", 7: "z"},
    )
    parts = parts_of(outputs)
    assert [id for part in parts for id in part.sequence_ids] == [5, 6, 7]
    assert [end for part in parts for end in part.ended] == outputs.ended
    assert [row for part in parts for row in (part.routed_experts.tolist())] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    for name in ("num_cached_tokens", "prompt_logprobs", "pooled", "prompt_routed_experts"):
        columns = [getattr(part, name) for part in parts]
        assert {k: v for column in columns for k, v in column.items()} == getattr(outputs, name)
        assert sum(map(len, columns)) == len(getattr(outputs, name))
    first_row = next(index for index, part in enumerate(parts) if part.sequence_ids)
    told = {id for part in parts[: first_row + 1] for id in part.prompt_routed_experts}
    assert told == {5, 6, 7}
