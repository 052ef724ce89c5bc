"""Work on many tensors, several at a time: copies and digests let other threads run."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int) -> list[_Result]:
    """`work` of each item, in order; on this thread if `num_threads` is 1. The first error ends it all."""
    if num_threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))
