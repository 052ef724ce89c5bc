"""Throws random requests at a live server, and looks at every answer, and at what is left behind."""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rollout_engine import RolloutPolicy
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.route import Route
from rollout_engine.serve.server import HttpServer
from tests.faults.progress import report, show_tasks
from tests.fuzz.http_requests import ADMIN_KEY, API_KEY, BODY_SECONDS, MAX_BODY_BYTES, PROMPT, Requests, Sent

OPTIONS = ServeOptions(
    port=0, api_key=API_KEY, admin_key=ADMIN_KEY, max_body_bytes=MAX_BODY_BYTES, body_seconds=BODY_SECONDS
)
_NUM_CLIENTS = 16
_PATIENCE = 60.0
"""Seconds after which an exchange hangs."""
_MEDIC_SECONDS = 0.05
_WARM_UP = 5000
MOST_GROWN_MIB = 16
"""Most memory that the second half of any number of requests may leave behind: caches of the allocator, not requests.
The first half fills those: what they hold ends growing."""
ENVIRONMENT = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""For a process that does this for long. Without it, where products are torch's, torch and oneDNN keep up to 1,024
primitives for each thread, one for each shape of a product: 50 MiB that come slowly, and belong to no request."""


class Answer(NamedTuple):
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes


class Held(NamedTuple):
    """What this process holds while nothing is asked of the server."""

    descriptors: int
    threads: int
    tasks: int
    bytes: int
    malloc_used: int
    """Bytes of C's heap that are in use; Python's own allocator has others. 0 where the C library is not glibc."""
    malloc_free: int
    """Bytes of it that are free and not given back: what fragments it."""


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def soak(checkpoint: Path, seconds: float, count: int) -> dict[str, Any]:
    """Random HTTP requests, so many at most. Raises `AssertionError` for the first wrong answer, and for leaks."""
    first = min(_WARM_UP, count)
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=64) as policy, HttpServer(policy, OPTIONS) as server:
        fuzz = HttpFuzz(server, policy, seed=17)
        asyncio.run(fuzz.run(first, seconds))  # what is allocated once is allocated now
        held = [fuzz.held()]
        for half in ((count - first) // 2, count - first - (count - first) // 2):
            asyncio.run(fuzz.run(half, seconds / 2))
            held.append(fuzz.held())
    assert all(each[:3] == held[0][:3] for each in held), f"leaked: {held}"
    mib = [each.bytes / (1 << 20) for each in held]
    grown = mib[2] - mib[1]
    assert grown < MOST_GROWN_MIB, f"{mib} MiB were held after the warm-up, half and all of {fuzz.num_sent} requests"
    return dict(
        requests=fuzz.num_sent,
        kinds=dict(fuzz.kinds),
        statuses={str(status): number for status, number in sorted(fuzz.statuses.items())},
        slowest_exchange_ms=round(1e3 * fuzz.slowest, 1),
        grown_mib=[round(mib[1] - mib[0], 1), round(grown, 1)],
        malloc_used_mib=[round(each.malloc_used / (1 << 20), 1) for each in held],
        malloc_free_mib=[round(each.malloc_free / (1 << 20), 1) for each in held],
        hangs=0,
        leaks=0,
        internal_errors=0,
        answers_of_no_shape=0,
        other_tokens_than_before=0,
    )


class HttpFuzz:
    """One server, the clients that attack it, and two that resume it and bring weights, whatever the others did."""

    def __init__(self, server: HttpServer, policy: RolloutPolicy, seed: int) -> None:
        self._server, self._policy, self._seed = server, policy, seed
        self._host, port = server.url.removeprefix("http://").split(":")
        self._port = int(port)
        self.num_sent = 0
        self.kinds, self.statuses = Counter[str](), Counter[int]()
        self.slowest = 0.0

    async def run(self, count: int, seconds: float = float("inf")) -> None:
        """Send so many more requests, and see that the server answers as ever. Raises `AssertionError`."""
        numbers, deadline = iter(range(self.num_sent, self.num_sent + count)), time.monotonic() + seconds
        with _no_errors():
            async with asyncio.TaskGroup() as tasks:
                medics = [tasks.create_task(_often(each)) for each in (self._resume, self._bring_weights)]
                expected = await self.reference()
                await asyncio.gather(*(tasks.create_task(self._attack(numbers, deadline)) for _ in range(_NUM_CLIENTS)))
                assert await self.reference() == expected, "other tokens than before"
                for medic in medics:
                    medic.cancel()
            await self._settle()

    async def reference(self) -> Any:
        """Tokens and log-probs of a request whose answer must never change."""
        body = {"prompt": PROMPT, "max_tokens": 8, "seed": 5, "n": 2, "logprobs": 0, "return_token_ids": True}
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            answer = await self._ask("/v1/completions", body)
            if answer.status == 200:
                choices = json.loads(answer.body)["choices"]
                return [(each["token_ids"], each["logprobs"]["token_logprobs"]) for each in choices]
            assert answer.status in (409, 503), answer
            await asyncio.sleep(_MEDIC_SECONDS)
        raise AssertionError(f"the server does not answer: {answer}")

    def held(self) -> Held:
        """What is held now."""
        gc.collect()
        tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in gc.get_objects())
        resident, (used, free) = psutil.Process().memory_info().rss, _malloc()
        return Held(len(os.listdir("/proc/self/fd")), threading.active_count(), tasks, resident, used, free)

    async def _settle(self) -> None:
        """Wait until the server knows that all have gone."""
        state, deadline = self._server._server.server_state, time.monotonic() + _PATIENCE
        while state.connections or state.tasks or self._policy.get_num_unfinished_requests():
            left = len(state.connections), len(state.tasks), self._policy.get_num_unfinished_requests()
            assert time.monotonic() < deadline, f"left behind: {left} connections, tasks and requests"
            await asyncio.sleep(0.01)
        assert self._server.app.served.num_open == 0

    async def _attack(self, numbers: Iterator[int], deadline: float) -> None:
        for number in numbers:
            if time.monotonic() > deadline:
                return
            sent = Requests(f"{self._seed}-{number}").next()
            start = time.monotonic()
            try:
                async with asyncio.timeout(_PATIENCE):
                    answers = await self._exchange(sent)
                _check(sent, answers)
            except (AssertionError, TimeoutError, ValueError, KeyError, TypeError, OSError) as problem:
                if isinstance(problem, TimeoutError):
                    show_tasks()
                shown = [part[:1500] for part in sent.parts]
                what = f"seed {self._seed}-{number}: {sent.kind}, {shown}: {problem!r}"
                raise AssertionError(f"{what}; {await self._where()}") from problem
            self.slowest = max(self.slowest, time.monotonic() - start)
            self.num_sent += 1
            report(self.num_sent)
            self.kinds[sent.kind] += 1
            self.statuses.update(answer.status for answer in answers)

    async def _where(self) -> str:
        """Work that the engine and the server have in hand, for an error."""
        try:
            core = (await asyncio.to_thread(self._policy.get_metrics, timeout=10)).core
        except Exception as problem:
            return f"the engine does not tell its metrics: {problem!r}"
        engine = f"the engine is {core.state}, {core.num_running} sequences run and {core.num_waiting} wait"
        return f"{engine}; {self._server.app.served.num_open} requests are open after {self.num_sent}"

    async def _exchange(self, sent: Sent) -> list[Answer]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        try:
            for part in sent.parts:
                writer.write(part)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0)
            if sent.then in ("leave", "reset"):
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(0.02):
                        await reader.read(200)
                if sent.then == "reset":
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return []
            if sent.then == "half-close":
                with contextlib.suppress(OSError):
                    writer.write_eof()
            return await _read_answers(reader, sent)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _ask(self, path: str, body: Any) -> Answer:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN_KEY}\r\n"
        request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        async with asyncio.timeout(_PATIENCE):
            [answer] = await self._exchange(Sent("ask", [request], [None]))
        return answer

    async def _resume(self) -> None:
        for path in ("/wake_up", "/resume"):
            await self._ask(path, {})

    async def _bring_weights(self) -> None:
        # A completion would not tell: one that a pause keeps waits for the weights, as it must.
        metrics = await asyncio.to_thread(self._policy.get_metrics)
        if metrics.core.state == "DIRTY":  # a sleep forgot them
            checkpoint = self._server.app.served.engine.frontend.client.info.config.model
            await self._ask("/update_weights", {"weight_dir": checkpoint})


async def _often(act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await act()
        await asyncio.sleep(_MEDIC_SECONDS)


async def _read_answers(reader: asyncio.StreamReader, sent: Sent) -> list[Answer]:
    answers: list[Answer] = []
    while sent.rows is None or len(answers) < len(sent.rows):
        method = sent.parts[0].partition(b" ")[0] if len(answers) == 0 else b""
        try:
            answer = await _read_answer(reader, method == b"HEAD")
        except (asyncio.IncompleteReadError, ConnectionError):
            assert sent.rows is None or (answers and answers[-1].headers.get("connection") == "close"), (
                f"the connection was closed after {len(answers)} of {len(sent.rows)} answers"
            )
            return answers
        if answer.status != 100:
            answers.append(answer)
    return answers


async def _read_answer(reader: asyncio.StreamReader, is_head: bool) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    version, status, _ = first.split(" ", 2)
    assert version == "HTTP/1.1", first
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif not is_head and status != "100":
        body = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(status), headers, body)


def _check(sent: Sent, answers: list[Answer]) -> None:
    for index, answer in enumerate(answers):
        row = sent.rows[index] if sent.rows is not None and index < len(sent.rows) else None
        allowed = sent.allowed[index] if sent.allowed and row is not None else set()
        assert answer.status != 500 and (not allowed or answer.status in allowed), answer
        if answer.status >= 400 and answer.body:
            _check_error(answer, row)
        assert answer.body or answer.status < 400 or sent.parts[0].startswith(b"HEAD"), answer


def _check_error(answer: Answer, row: Route | None) -> None:
    assert answer.headers["content-type"] == "application/json", answer
    found = json.loads(answer.body)
    error = found["error"]
    assert isinstance(error["message"], str) and error["message"], answer
    assert isinstance(error["type"], str), answer
    assert found.get("type") == "error" if "code" not in error else error["code"] == answer.status, answer
    if row is not None:
        assert ("code" not in error) == (row.dialect == "anthropic"), answer
    if row is not None and row.dialect == "sglang":
        assert found["message"] == error["message"] and found["success"] is False, answer


@contextlib.contextmanager
def _no_errors() -> Iterator[None]:
    """See that nothing in here logs an error: the server's faults, and tasks that nobody asked how they ended."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(handler.format(record))  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("rollout_engine", "uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not found, f"{len(found)} errors were logged: {found[0]}"


def _malloc() -> tuple[int, int]:
    """Bytes of C's heap that are used, and that are free."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0, 0
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return found.uordblks + found.hblkhd, found.fordblks
