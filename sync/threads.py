"""Work on many tensors, several at a time: copies and digests let other threads run."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int, sizes: Sequence[int] = ()
) -> list[_Result]:
    """`work` of each item, in order, on this thread and `num_threads` - 1 others. An error ends it all.

    `sizes`: of the items; the largest begin first, so that no thread is left with one while the others are done.
    """
    numbered = list(enumerate(items))
    if sizes:
        numbered.sort(key=lambda pair: -sizes[pair[0]])
    ahead = iter(numbered)  # threads may share it: a step is one call into C
    results: dict[int, _Result] = {}

    def run() -> None:
        try:
            for i, item in ahead:
                results[i] = work(item)
        except BaseException:
            list(ahead)  # leaves nothing to the others
            raise

    if num_threads == 1:
        run()
    else:
        with ThreadPoolExecutor(num_threads - 1) as pool:
            others = [pool.submit(run) for _ in range(num_threads - 1)]
            run()
        for other in others:
            other.result()
    return [results[i] for i in range(len(results))]
