"""Puts engines that divide experts to sleep behind their requests: no engine can end one once another is asleep."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rollout_engine.engine.calls import CallFuture, copy_outcome


def sleeps_behind_requests(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a verb lets requests end, and then takes experts away that other engines need for theirs."""
    return name == "sleep" and arguments.get("mode") == "wait" and arguments.get("level", 1) in (1, 2)


def sleep_together(call: Callable[[str, Mapping[str, Any]], CallFuture], arguments: Mapping[str, Any]) -> CallFuture:
    """Have all engines end their requests and stop scheduling; when all have, have them release memory.

    `call` calls a verb on all engines. If requests do not end in time, the engines stop scheduling behind them, and
    keep their memory.
    """
    result = CallFuture()
    result.begin()

    def release(stopped: Future[Any]) -> None:
        if stopped.cancelled():
            return
        try:
            stopped.result()
            asleep = call("sleep", {**arguments, "mode": "keep"})
        except Exception as error:
            result.fail(error)
        else:
            asleep.add_done_callback(lambda done: copy_outcome(done, result))

    stopped = call("sleep", {**arguments, "level": 0})
    stopped.add_done_callback(release)
    result.add_done_callback(lambda done: stopped.cancel() if done.cancelled() else None)
    return result
