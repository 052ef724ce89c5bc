"""Clients that mean no good, in a process of their own: python -m tests.faults.attacks ADDRESS ATTACK=COUNT ...

Each attack does what it does `count` times to the core at an address, waits for every answer, and leaves.
"""

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec

from rollout_engine import RolloutEngineError, SamplingParams
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.children.failure import WireError
from rollout_engine.process.process_client import ProcessClient
from rollout_engine.process.wire import Decoder, ToCore
from tests.faults.garbage import core_messages, mutants
from tests.faults.peers import RawClient

_NUM_OPEN = 64
"""Calls that an attacker has in flight."""


class Listener:
    """Takes what comes for an attacker's requests, and the errors of those that are refused."""

    def __init__(self) -> None:
        self.num_ended = 0

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        self.num_ended += len(outputs.ended)

    def refuse(self, first_sequence_id: int, error: Exception) -> None:
        self.num_ended += 1

    def fail_all(self, error: Exception) -> None:
        self.num_ended = sys.maxsize


@contextmanager
def connected(address: str) -> Iterator[ProcessClient]:
    """A client with a listener, which leaves in the end."""
    client = ProcessClient.connect(address, hang_seconds=60)
    client.listen(Listener())
    try:
        yield client
    finally:
        client.shutdown()


def clients(address: str, count: int) -> None:
    """Connect, ask for the metrics, leave a call unanswered, and go."""
    for _ in range(count):
        with connected(address) as client:
            client.call("get_core_metrics", {}).result(60)
            client.call("get_model_metadata", {})


def calls(address: str, count: int) -> None:
    """Call verbs with arguments that they must refuse."""
    choose = random.Random(21)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("pause_generation", dict(mode="later", clear_cache=False, wait_for_inflight_requests=None)),
        ("sleep", dict(level=7, mode="keep")),
        ("wake_up", dict(tags=["heap"] * 50)),
        ("score", dict(prompt_token_ids=[[1 << 40]], completion_token_ids=[[3]], temperature=1.0)),
        ("score", dict(prompt_token_ids=[[3]], completion_token_ids=[[4]], temperature=-1.0)),
        ("collective_rpc", dict(method="no_such_method", timeout=None, args=[], kwargs={})),
        ("collective_rpc", dict(method="get_weight_norms", timeout=0.001, args=list(range(500)), kwargs={})),
        ("end_weight_update", {}),
    ]
    with connected(address) as client:
        _answered(client, (choose.choice(wrong) for _ in range(count)))


def requests(address: str, count: int) -> None:
    """Add requests that the core must refuse."""
    params = SamplingParams(max_tokens=5)
    with connected(address) as client:
        listener = client._listener
        assert isinstance(listener, Listener)
        first = client.index << 40
        for i in range(count):
            request = EngineCoreRequest(
                prompt_token_ids=[[], [1 << 30], [-1], [3] * 100_000][i % 4],
                params=params,
                max_tokens=5,
                seed=i,
                first_sequence_id=first + i,
            )
            client.add_request(request)
            if i % _NUM_OPEN == 0:
                client.call("check_integrity", {}).result(60)
        client.call("check_integrity", {}).result(60)
        assert listener.num_ended == count, f"{listener.num_ended} of {count} requests were refused"


def tiny(address: str, count: int) -> None:
    """Add requests of one token each, all of them right, as fast as the core takes them."""
    params = SamplingParams(max_tokens=1, output_kind="final_only", detokenize=False)
    with connected(address) as client:
        listener = client._listener
        assert isinstance(listener, Listener)
        request = EngineCoreRequest(prompt_token_ids=[5], params=params, max_tokens=1, seed=1, first_sequence_id=0)
        for i in range(count):
            client.add_request(msgspec.structs.replace(request, seed=i, first_sequence_id=(client.index << 40) + i))
        while listener.num_ended < count:
            time.sleep(0.01)


def waits(address: str, count: int) -> None:
    """Wait for requests to end, one of which never does."""
    with connected(address) as client:
        params = SamplingParams(max_tokens=30_000, ignore_eos=True, output_kind="final_only")
        first = client.index << 40
        request = EngineCoreRequest(
            prompt_token_ids=[5], params=params, max_tokens=30_000, seed=1, first_sequence_id=first
        )
        for i in range(0, count, 5000):
            client.add_request(msgspec.structs.replace(request, first_sequence_id=first + i))
            drain = "wait_for_requests_to_drain", dict(drain_timeout=0.002)
            _answered(client, (drain for _ in range(min(5000, count - i))))
            client.abort([first + i])


def aborts(address: str, count: int) -> None:
    """Abort sequences that never were, one a message."""
    with connected(address) as client:
        for i in range(count):
            client.abort([i])
        client.call("check_integrity", {}).result(600)


def frames(address: str, count: int) -> None:
    """Send frames that are no message."""
    decoder, source = Decoder[Any](ToCore), mutants(core_messages(), sys.maxsize, random.Random(22))
    with RawClient(address) as client:
        while client.num_bad < count:
            frames = next(source)
            try:
                decoder.decode(frames)
            except WireError:
                client.throw(frames)
        client.wait_rejected()
        assert not client.is_gone, "the core ended, or cut the client off"


ATTACKS: dict[str, tuple[Callable[[str, int], None], int]] = {
    "clients": (clients, 1000),
    "calls": (calls, 30_000),
    "requests": (requests, 30_000),
    "tiny": (tiny, 30_000),
    "waits": (waits, 20_000),
    "aborts": (aborts, 210_000),
    "frames": (frames, 100_000),
}
"""Name -> what it does, and how often."""


def _answered(client: ProcessClient, calls: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Call verbs, some at a time, each of which has to raise an error of ours."""
    waiting: deque[tuple[str, Future[Any]]] = deque()
    for name, arguments in calls:
        waiting.append((name, client.call(name, arguments)))
        if len(waiting) == _NUM_OPEN:
            _refused(*waiting.popleft())
    while waiting:
        _refused(*waiting.popleft())


def _refused(name: str, answer: Future[Any]) -> None:
    try:
        result = answer.result(600)
    except (RolloutEngineError, TimeoutError):
        return
    raise AssertionError(f"{name} gave {result!r:.80} for what it had to refuse")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        name, _, count = each.partition("=")
        ATTACKS[name][0](sys.argv[1], int(count))
