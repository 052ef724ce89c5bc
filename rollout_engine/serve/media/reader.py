"""Reads the pictures of requests before any route sees them, and bounds what they take."""

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from rollout_engine.base.errors import RequestError
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.media.downloads import download, too_long
from rollout_engine.serve.media.files import AllowedDirectories
from rollout_engine.serve.media.hosts import AllowedHosts
from rollout_engine.serve.media.sources import Source, sources_of
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked
from rollout_engine.text.data_urls import DATA_URL_FORM, decode_base64, decode_data_url

R = TypeVar("R")

_MOST_PICTURES = 1024
"""Pictures that one request may name."""
_MOST_DOWNLOADS, _OF_REQUEST = 64, 8
"""Downloads at a time, of all requests and of one."""


class MediaReader:
    """Puts the bytes of pictures in place of the texts that name them, and has them processed off the event loop.

    The bytes that pictures take are counted until their requests have been answered.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._hosts, self._directories = AllowedHosts(options.allow_media), AllowedDirectories(options.allow_media_dir)
        self._lock, self._num_bytes = threading.Lock(), 0
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()

    async def read(self, asked: Asked) -> None:
        """Put the bytes of each picture that a request names into its body.

        Raises `RequestError` and `HttpProblem`, which name the picture's place in the body.
        """
        sources = await asked.read_fields(sources_of, asked.body)
        if not sources:
            return
        if len(sources) > _MOST_PICTURES:
            bound = f"at most {_MOST_PICTURES} pictures in one request"
            raise RequestError.for_field(sources[-1].field, f"picture {len(sources)}", bound)
        turn = asyncio.Semaphore(_OF_REQUEST)
        tasks = [asyncio.ensure_future(self._put(each, asked, turn)) for each in sources]
        try:
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()

    async def process(self, function: Callable[[], R], drop: Callable[[R], object] | None = None) -> R:
        """The result of a function that decodes and processes pictures; on a thread, a few at a time.

        A call whose client leaves keeps its turn to the end, so that clients that leave cannot begin more of them.
        Its result is then passed to `drop`.
        """
        turns = self._turns_here().processing
        await turns.acquire()
        work = asyncio.ensure_future(run_in_thread(function))
        work.add_done_callback(lambda _: turns.release())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if drop is not None:
                work.add_done_callback(partial(_drop_result, drop))
            raise

    def count(self, asked: Asked, num_bytes: int) -> None:
        """Count bytes that the pictures of a request take; from any thread.

        Raises `HttpProblem`: 413 if they are more than all pictures may take, 503 if they are so with those of other
        requests, or if the request's client has left.
        """
        most = self._options.max_open_picture_bytes
        with self._lock:
            if asked.is_answered:
                raise HttpProblem(503, "The client has left.")
            asked.num_picture_bytes += num_bytes
            self._num_bytes += num_bytes
            of_request, of_all = asked.num_picture_bytes, self._num_bytes
        if of_request > most:
            advice = "send fewer, or start the server with a larger --max-open-picture-bytes"
            raise HttpProblem(413, f"The request's pictures take {of_request} bytes of {most}: {advice}.")
        if of_all > most:
            raise HttpProblem(503, f"Pictures of open requests take {most} bytes: send the request again later.")

    def release(self, asked: Asked) -> None:
        """Count the pictures of a request no more: it has been answered."""
        with self._lock:
            self._num_bytes -= asked.num_picture_bytes
            asked.is_answered = True

    @property
    def num_open_bytes(self) -> int:
        """Bytes of the pictures of requests that have not been answered."""
        return self._num_bytes

    def _turns_here(self) -> "_Turns":
        return self._turns.setdefault(asyncio.get_running_loop(), _Turns())

    async def _put(self, source: Source, asked: Asked, turn: asyncio.Semaphore) -> None:
        async with turn:
            source.put(await self._read(source, asked))

    async def _read(self, source: Source, asked: Asked) -> bytes:
        text, field, scheme = source.text, source.field, source.text[:8].lower()
        most, count = self._options.max_picture_bytes, partial(self.count, asked)
        if scheme.startswith(("http://", "https://")):
            seconds = self._options.picture_seconds
            async with self._turns_here().downloads:
                return await download(text, self._hosts, field, most=most, seconds=seconds, count=count)
        is_data = scheme.startswith("data:")
        if scheme.startswith("file://"):
            found = await run_in_thread(self._directories.read, text, field, most)
        elif not is_data and not source.is_base64:
            raise RequestError.for_field(field, text[:100], f"a URL: {DATA_URL_FORM}, or one of http(s) or file")
        elif len(text) * 3 // 4 > most + len(DATA_URL_FORM):
            raise too_long(field, most)
        else:
            found = await run_in_thread(decode_data_url if is_data else decode_base64, text, field)
        if len(found) > most:
            raise too_long(field, most)
        count(len(found))
        return found


def _drop_result(drop: Callable[[R], object], work: "asyncio.Future[R]") -> None:
    if not work.cancelled() and work.exception() is None:
        drop(work.result())


class _Turns:
    """Bounds on the work that an event loop has at a time."""

    def __init__(self) -> None:
        self.downloads = asyncio.Semaphore(_MOST_DOWNLOADS)
        self.processing = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 2))
