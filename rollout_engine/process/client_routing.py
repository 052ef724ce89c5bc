"""Several clients on one core: each has sequence numbers of its own, by which the outputs of a step are divided.

Client c counts its sequences from c << 40.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollout_engine.errors import RequestError
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest

NUM_ROWS = 512
"""Rows of a slice."""
_SHIFT = 40


def first_sequence_of(client_index: int) -> int:
    """The first sequence id of a client."""
    return client_index << _SHIFT


def client_of(sequence_id: int) -> int:
    """The index of the client that a sequence belongs to."""
    return sequence_id >> _SHIFT


def check_sequences(client_index: int, request: EngineCoreRequest) -> None:
    """Raise `RequestError` where a client's request has sequence numbers that are not its own."""
    first, last = request.first_sequence_id, request.first_sequence_id + request.params.n - 1
    if not first >> _SHIFT == last >> _SHIFT == client_index:
        bound = f"in [{client_index} * 2**{_SHIFT}, {client_index + 1} * 2**{_SHIFT} - n], client {client_index}'s own"
        raise RequestError.for_field("first_sequence_id", first, bound)


def sequences_of_client(client_index: int, sequences: Iterable[int]) -> list[int]:
    """Select this client's sequence ids."""
    return [sequence for sequence in sequences if sequence >> _SHIFT == client_index]


def split(outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """Client index -> what is its own of a step's outputs; clients without news are absent."""
    clients = {number >> _SHIFT for number in outputs.sequence_ids}
    clients.update(end.sequence_id >> _SHIFT for end in outputs.ended)
    for column in (outputs.num_cached_tokens, outputs.prompt_logprobs, outputs.pooled):
        clients.update(number >> _SHIFT for number in column)
    if len(clients) == 1:
        return {clients.pop(): outputs}
    return {client_index: _share(outputs, client_index) for client_index in clients}


def _share(outputs: EngineCoreOutputs, client_index: int) -> EngineCoreOutputs:
    share = msgspec.structs.replace(
        outputs,
        ended=[end for end in outputs.ended if end.sequence_id >> _SHIFT == client_index],
        num_cached_tokens=_own_keys(outputs.num_cached_tokens, client_index),
        prompt_logprobs=_own_keys(outputs.prompt_logprobs, client_index),
        pooled=_own_keys(outputs.pooled, client_index),
    )
    share.keep_rows([row for row, id in enumerate(outputs.sequence_ids) if id >> _SHIFT == client_index])
    return share


def _own_keys(by_sequence: dict[int, Any], client_index: int) -> dict[int, Any]:
    return {number: value for number, value in by_sequence.items() if number >> _SHIFT == client_index}


def halves(outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
    """Divide the outputs of a step in two; one that cannot be divided is returned alone."""
    num_rows = len(outputs.sequence_ids)
    first, second = msgspec.structs.replace(outputs), msgspec.structs.replace(outputs)
    if len(outputs.prompt_logprobs) > 1:
        first.prompt_logprobs, second.prompt_logprobs = _halves(outputs.prompt_logprobs)
        first.ended, first.pooled, second.num_cached_tokens = [], {}, {}
        first.keep_rows([])
    elif len(outputs.pooled) > 1:  # each at the latest with its end
        first.pooled, second.pooled = _halves(outputs.pooled)
        first.ended, second.num_cached_tokens, second.prompt_logprobs = [], {}, {}
        second.keep_rows([])
    elif num_rows > 1:
        first.ended, second.num_cached_tokens, second.prompt_logprobs, second.pooled = [], {}, {}, {}
        first.keep_rows([*range(num_rows // 2)])
        second.keep_rows([*range(num_rows // 2, num_rows)])
    elif len(outputs.ended) > 1:
        middle = len(outputs.ended) // 2
        first.ended, second.ended = outputs.ended[:middle], outputs.ended[middle:]
        second.num_cached_tokens, second.prompt_logprobs, second.pooled = {}, {}, {}
        second.keep_rows([])
    else:
        return [outputs]
    return [first, second]


def _halves(by_sequence: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    items, middle = [*by_sequence.items()], len(by_sequence) // 2
    return dict(items[:middle]), dict(items[middle:])


def slices(outputs: EngineCoreOutputs) -> Iterator[EngineCoreOutputs]:
    """Yield the outputs a few rows at a time, the ends with the last; between two slices other threads have a turn."""
    num_rows = len(outputs.sequence_ids)
    if num_rows <= NUM_ROWS:
        yield outputs
        return
    for start in range(0, num_rows, NUM_ROWS):
        part = msgspec.structs.replace(
            outputs,
            ended=outputs.ended if start + NUM_ROWS >= num_rows else [],
            num_cached_tokens=outputs.num_cached_tokens if start == 0 else {},
            prompt_logprobs=outputs.prompt_logprobs if start == 0 else {},
            pooled=outputs.pooled if start == 0 else {},
        )
        part.keep_rows(list(range(start, min(start + NUM_ROWS, num_rows))))
        yield part
        time.sleep(0)
