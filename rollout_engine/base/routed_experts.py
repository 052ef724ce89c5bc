"""Which experts the routers of a mixture of experts chose for each token: shapes, dtypes and checks, without torch.

    routed_experts[i, l, :]    the experts of token i in the l-th layer that has a router, as its router ordered them

Of prompt and completion together the last token has no entry: it was sampled and never computed.
"""

from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError


class RoutingInfo(msgspec.Struct, frozen=True):
    """Sizes of a model's routers, which are all alike."""

    num_layers: int
    """Layers that have a router, in the order in which they compute."""
    num_experts: int
    top_k: int
    """Experts that a router chooses for a token."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 for up to 256 experts, else int16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of one token's experts."""
        return self.num_layers, self.top_k

    @property
    def num_token_bytes(self) -> int:
        """Bytes of one token's experts."""
        return self.num_layers * self.top_k * self.dtype.itemsize


def check_routing_asked(is_asked: bool, info: RoutingInfo | None) -> None:
    """Raise `RequestError` for `return_routed_experts` if the engine has no routers to report."""
    if is_asked and info is None:
        hint = "This engine's model has no routers that are all alike."
        raise RequestError.for_field("return_routed_experts", True, "False", hint)


def as_array(field: str, given: Any) -> np.ndarray:
    """Routed experts of one sequence as an array. Raises `RequestError` for None and for lists of several lengths."""
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.asarray(None)
    if array.dtype == object:
        bound = "an array of integers: tokens, layers, experts"
        hint = "SamplingParams(return_routed_experts=True) gives such; leave them out where routers are to choose."
        raise RequestError.for_field(field, given, bound, hint)
    return array


def checked_rows(field: str, given: Any, num_tokens: int, info: RoutingInfo) -> np.ndarray:
    """Return routed experts of one sequence to replay, int16 [num_tokens - 1, L, k]; -1: the router's own choice.

    `given` are integers of that shape, or of fewer tokens: the routers choose for those that are missing. Raises
    `RequestError` for other shapes and dtypes, ids of experts that do not exist, and an expert that stands twice.
    """
    rows = np.asarray(given)
    bound = f"integers [up to {num_tokens - 1}, {info.num_layers}, {info.top_k}]: tokens, layers, experts"
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or rows.shape[1:] != info.shape or len(rows) > num_tokens - 1:
        raise RequestError.for_field(field, f"{rows.dtype} {list(rows.shape)}", bound)
    check_expert_ids(field, rows, info)
    found = np.full((num_tokens - 1, *info.shape), -1, np.int16)
    found[: len(rows)] = rows
    return found


def check_expert_ids(field: str, rows: np.ndarray, info: RoutingInfo) -> None:
    """Raise `RequestError` for ids [..., k] that are no experts, or stand twice; -1 may stand for all k."""
    flat = rows.reshape(-1, info.top_k).astype(np.int64)
    own = (flat == -1).all(-1)
    wrong = ~own & ((flat < 0) | (flat >= info.num_experts)).any(-1)
    ordered = np.sort(flat, -1)
    twice = ~own & (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    for rows_with, what in ((wrong, "experts in"), (twice, "different experts in")):
        if rows_with.any():
            index = int(rows_with.argmax())
            place = np.unravel_index(index, rows.shape[:-1])
            bound = f"{info.top_k} {what} [0, {info.num_experts}), or -1 in all {info.top_k} places"
            raise RequestError.for_field(f"{field}[{', '.join(map(str, place))}]", flat[index].tolist(), bound)
