"""Several clients on one core: each has sequence numbers of its own, by which the outputs of a step are divided.

Client c counts its sequences from c << 40.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest

NUM_ROWS = 512
"""Rows of a slice."""
_SHIFT = 40
_OF_PROMPTS = ("prompt_logprobs", "prompt_routed_experts", "prompt_hidden_states")
"""Columns with one entry for a prompt, which may be long."""


def first_sequence_of(client_index: int) -> int:
    """The first sequence id of a client."""
    return client_index << _SHIFT


def client_of(sequence_id: int) -> int:
    """The index of the client that a sequence belongs to."""
    return sequence_id >> _SHIFT


def check_sequences(client_index: int, request: EngineCoreRequest) -> None:
    """Raise `RequestError` if a client's request has sequence numbers that are not its own."""
    first, last = request.first_sequence_id, request.first_sequence_id + request.params.n - 1
    if not first >> _SHIFT == last >> _SHIFT == client_index:
        bound = f"in [{client_index} * 2**{_SHIFT}, {client_index + 1} * 2**{_SHIFT} - n], client {client_index}'s own"
        raise RequestError.for_field("first_sequence_id", first, bound)


def sequences_of_client(client_index: int, sequences: Iterable[int]) -> list[int]:
    """Select this client's sequence ids."""
    return [sequence for sequence in sequences if sequence >> _SHIFT == client_index]


def split(outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """Split a step's outputs: client index -> its own part; clients without news are absent."""
    clients = {number >> _SHIFT for number in outputs.sequence_ids}
    clients.update(end.sequence_id >> _SHIFT for end in outputs.ended)
    for name in ("num_cached_tokens", "pooled", *_OF_PROMPTS):
        clients.update(number >> _SHIFT for number in getattr(outputs, name))
    if len(clients) == 1:
        return {clients.pop(): outputs}
    return {client_index: _share(outputs, client_index) for client_index in clients}


def _share(outputs: EngineCoreOutputs, client_index: int) -> EngineCoreOutputs:
    share = msgspec.structs.replace(
        outputs,
        ended=[end for end in outputs.ended if end.sequence_id >> _SHIFT == client_index],
        num_cached_tokens=_own_keys(outputs.num_cached_tokens, client_index),
        pooled=_own_keys(outputs.pooled, client_index),
        **{name: _own_keys(getattr(outputs, name), client_index) for name in _OF_PROMPTS},
    )
    share.keep_rows([row for row, id in enumerate(outputs.sequence_ids) if id >> _SHIFT == client_index])
    return share


def _own_keys(by_sequence: dict[int, Any], client_index: int) -> dict[int, Any]:
    return {number: value for number, value in by_sequence.items() if number >> _SHIFT == client_index}


def halves(outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
    """Divide the outputs of a step in two; one that cannot be divided is returned alone."""
    num_rows = len(outputs.sequence_ids)
    first, second = msgspec.structs.replace(outputs), msgspec.structs.replace(outputs)
    long = next((name for name in _OF_PROMPTS if len(getattr(outputs, name)) > 1), None)
    if long is not None:
        for name, divided in zip(_OF_PROMPTS, _halves_of_one(outputs, long), strict=True):
            for half, part in zip((first, second), divided, strict=True):
                setattr(half, name, part)
        first.ended, first.pooled, second.num_cached_tokens = [], {}, {}
        first.keep_rows([])
    elif len(outputs.pooled) > 1:  # each at the latest with its end
        first.pooled, second.pooled = _halves(outputs.pooled)
        first.ended = []
        _drop_prompts(second)
        second.keep_rows([])
    elif num_rows > 1:
        first.ended, second.pooled = [], {}
        _drop_prompts(second)
        first.keep_rows([*range(num_rows // 2)])
        second.keep_rows([*range(num_rows // 2, num_rows)])
    elif len(outputs.ended) > 1:
        middle = len(outputs.ended) // 2
        first.ended, second.ended = outputs.ended[:middle], outputs.ended[middle:]
        second.pooled = {}
        _drop_prompts(second)
        second.keep_rows([])
    else:
        return [outputs]
    return [first, second]


def _halves_of_one(outputs: EngineCoreOutputs, long: str) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Each of `_OF_PROMPTS` for two halves: `long` divided, the others whole in the second, with the tokens."""
    return [_halves(getattr(outputs, name)) if name == long else ({}, getattr(outputs, name)) for name in _OF_PROMPTS]


def _drop_prompts(outputs: EngineCoreOutputs) -> None:
    """Leave out fields of prompts: an earlier part of the same outputs has them."""
    for name in ("num_cached_tokens", *_OF_PROMPTS):
        setattr(outputs, name, {})


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
            pooled=outputs.pooled if start == 0 else {},
            **{name: getattr(outputs, name) if start == 0 else {} for name in _OF_PROMPTS},
        )
        part.keep_rows(list(range(start, min(start + NUM_ROWS, num_rows))))
        yield part
        time.sleep(0)
