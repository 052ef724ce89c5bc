"""Several clients on one core: each has sequence numbers of its own, by which the outputs of a step are divided.

Client c counts its sequences from c << 40.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np

from rollout_engine.errors import RequestError
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs

_SHIFT = 40
_COLUMNS = ("sequences", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass")


def first_sequence_of(client_index: int) -> int:
    """Where a client begins to count its sequences."""
    return client_index << _SHIFT


def check_sequences(client_index: int, request: EngineCoreRequest) -> None:
    """Raise `RequestError` where a client's request has sequence numbers that are not its own."""
    first, last = request.first_sequence, request.first_sequence + request.params.n - 1
    if not first >> _SHIFT == last >> _SHIFT == client_index:
        bound = f"in [{client_index} * 2**{_SHIFT}, {client_index + 1} * 2**{_SHIFT} - n], client {client_index}'s own"
        raise RequestError.for_field("first_sequence", first, bound)


def sequences_of_client(client_index: int, sequences: Iterable[int]) -> list[int]:
    """Those of `sequences` that are this client's."""
    return [sequence for sequence in sequences if sequence >> _SHIFT == client_index]


def split(outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """Client index -> what is its own of a step's outputs; clients without news are absent."""
    clients = {number >> _SHIFT for number in outputs.sequences}
    clients.update(end.sequence >> _SHIFT for end in outputs.ended)
    clients.update(number >> _SHIFT for number in (*outputs.num_cached_tokens, *outputs.prompt_logprobs))
    if len(clients) == 1:
        return {clients.pop(): outputs}
    return {client_index: _share(outputs, client_index) for client_index in clients}


def _share(outputs: EngineCoreOutputs, client_index: int) -> EngineCoreOutputs:
    own = [number >> _SHIFT == client_index for number in outputs.sequences]
    share = EngineCoreOutputs(
        policy_version=outputs.policy_version,
        start_time=outputs.start_time,
        ended=[end for end in outputs.ended if end.sequence >> _SHIFT == client_index],
        num_cached_tokens=_own_keys(outputs.num_cached_tokens, client_index),
        prompt_logprobs=_own_keys(outputs.prompt_logprobs, client_index),
    )
    for name in _COLUMNS:
        setattr(share, name, _own(getattr(outputs, name), own))
    if outputs.top_logprobs is not None:
        ids, values = outputs.top_logprobs
        share.top_logprobs = ids[np.array(own, dtype=bool)], values[np.array(own, dtype=bool)]
    if outputs.sampled_ranks is not None:
        share.sampled_ranks = outputs.sampled_ranks[np.array(own, dtype=bool)]
    if outputs.id_logprobs is not None:
        rows = outputs.id_logprobs.rows()
        share.id_logprobs = IdLogprobs.of({s: values for s, values in rows if s >> _SHIFT == client_index})
    return share


def _own(column: Sequence[Any] | None, own: list[bool]) -> list[Any] | None:
    return None if column is None else list(compress(column, own))


def _own_keys(told: dict[int, Any], client_index: int) -> dict[int, Any]:
    return {number: value for number, value in told.items() if number >> _SHIFT == client_index}
