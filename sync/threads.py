"""Work on many tensors in several threads: copies and digests release the GIL."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from sync.errors import SyncError

MAX_THREADS = 1_024

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def thread_count(num_threads: int, num_items: int) -> int:
    """Threads to use for `num_items`: `num_threads`, or fewer. Raises `SyncError` unless 1 <= num_threads <= 1024."""
    if type(num_threads) is not int or not 1 <= num_threads <= MAX_THREADS:
        raise SyncError(f"num_threads={num_threads!r:.80} is not allowed: must be an int in [1, {MAX_THREADS}].")
    return max(1, min(num_threads, num_items))


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int, sizes: Sequence[int] = ()
) -> list[_Result]:
    """`[work(item) for item in items]`, on this thread and up to `num_threads` - 1 others. An error ends all of them.

    `sizes`: sizes of the items. The largest begin first, so that no thread starts one when the others are done.
    Threads that the system cannot start are done without.
    """
    numbered = list(enumerate(items))
    num_threads = thread_count(num_threads, len(numbered))
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
        others: list[Future[None]] = []
        with ThreadPoolExecutor(num_threads - 1) as pool:
            with suppress(RuntimeError):  # the system has no more threads
                for _ in range(num_threads - 1):
                    others.append(pool.submit(run))
            run()
        for other in others:
            other.result()
    return [results[i] for i in range(len(results))]
