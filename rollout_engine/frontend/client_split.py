"""Several clients on one core: their request ids and sequence numbers kept apart, a step's outputs divided.

towards the core: request id "abc" of client 2 is "abc:2", its sequence 7 is (2 << 40) + 7
child ids stay child ids: "0_abc" of client 2 is "0_abc:2"
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from rollout_engine.errors import RequestError
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest

_SHIFT = 40
_COLUMNS = ("token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass")


def inner_id(client_index: int, request_id: str) -> str:
    """What the core calls a client's request or sample."""
    return f"{request_id}:{client_index}"


def ids_of_client(client_index: int, inner_ids: Iterable[str]) -> list[str]:
    """Those of `inner_ids` that are this client's."""
    return [name for name in inner_ids if name.rpartition(":")[2] == str(client_index)]


def inner_request(client_index: int, request: EngineCoreRequest) -> EngineCoreRequest:
    """A client's request as the core gets it. Raises `RequestError` for sequence numbers that are not its own."""
    last = request.first_sequence + request.params.n - 1
    if not 0 <= request.first_sequence <= last < 1 << _SHIFT:
        raise RequestError.for_field("first_sequence", request.first_sequence, f"in [0, 2**{_SHIFT} - n]")
    return msgspec.structs.replace(
        request,
        request_id=inner_id(client_index, request.request_id),
        first_sequence=(client_index << _SHIFT) + request.first_sequence,
    )


def split(outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """Client index -> what is its own of a step's outputs; clients without news are absent."""
    clients = {number >> _SHIFT for number in outputs.sequences}
    clients.update(end.sequence >> _SHIFT for end in outputs.ended)
    clients.update(number >> _SHIFT for number in (*outputs.num_cached_tokens, *outputs.prompt_logprobs))
    if clients == {0}:
        return {0: outputs}
    return {client_index: _share(outputs, client_index) for client_index in clients}


def _share(outputs: EngineCoreOutputs, client_index: int) -> EngineCoreOutputs:
    own = [number >> _SHIFT == client_index for number in outputs.sequences]
    first = client_index << _SHIFT
    share = EngineCoreOutputs(
        policy_version=outputs.policy_version,
        start_time=outputs.start_time,
        sequences=[number - first for number in compress(outputs.sequences, own)],
        ended=[
            msgspec.structs.replace(end, sequence=end.sequence - first)
            for end in outputs.ended
            if end.sequence >> _SHIFT == client_index
        ],
        num_cached_tokens={
            number - first: count
            for number, count in outputs.num_cached_tokens.items()
            if number >> _SHIFT == client_index
        },
        prompt_logprobs={
            number - first: logprobs
            for number, logprobs in outputs.prompt_logprobs.items()
            if number >> _SHIFT == client_index
        },
    )
    for name in _COLUMNS:
        setattr(share, name, _own(getattr(outputs, name), own))
    if outputs.top_logprobs is not None:
        ids, values = outputs.top_logprobs
        share.top_logprobs = ids[np.array(own, dtype=bool)], values[np.array(own, dtype=bool)]
    return share


def _own(column: Sequence[Any] | None, own: list[bool]) -> list[Any] | None:
    return None if column is None else list(compress(column, own))
