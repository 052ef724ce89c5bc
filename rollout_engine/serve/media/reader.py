"""Reads and processes the pictures of requests before any route sees them, and bounds the memory that they take."""

import asyncio
import os
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
from rollout_engine.text.picture_processor import ReadPicture

R = TypeVar("R")

_MOST_PICTURES = 1024
"""Pictures that one request may name."""
_MOST_DOWNLOADS, _OF_REQUEST = 64, 8
"""Downloads at a time, of all requests and of one."""
_MOST_DECODED = 8
"""Pictures that are decoded and processed at a time: each takes up to 17 bytes for each of its pixels meanwhile."""


class MediaReader:
    """Puts pictures in place of the texts that name them in bodies.

    The bytes that they take are counted until their requests have been answered.

    Args:
        read_image: processes the file of a picture for the model (`InputProcessor.read_image`).
        max_prompt_pictures: most pictures of one prompt; 0: `read_image` refuses all.
    """

    def __init__(
        self,
        options: ServeOptions,
        read_image: Callable[[bytes, str], ReadPicture],
        max_prompt_pictures: int = _MOST_PICTURES,
    ) -> None:
        self._options, self._read_image, self._max_prompt_pictures = options, read_image, max_prompt_pictures
        self._hosts, self._directories = AllowedHosts(options.allow_media), AllowedDirectories(options.allow_media_dir)
        self.num_open_bytes = 0
        """Bytes of the pictures of requests that have not been answered."""
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()

    async def read(self, asked: Asked) -> None:
        """Put each picture that a request names into its body, as `ReadPicture`.

        Raises `RequestError` and `HttpProblem`, which name the picture's place in the body.
        """
        sources = await asked.read_fields(sources_of, asked.body)
        if not sources:
            return
        if not self._max_prompt_pictures:
            self._read_image(b"", sources[0].field)  # names the reason, before anything is downloaded
        is_batch = hasattr(asked.body, "image_data")
        most = _MOST_PICTURES if is_batch else self._max_prompt_pictures
        if len(sources) > most:
            bound = f"at most {most} pictures in one {'request' if is_batch else 'prompt (max_prompt_pictures)'}"
            raise RequestError.for_field(sources[most].field, f"picture {most + 1}", bound)
        turn = asyncio.Semaphore(_OF_REQUEST)
        tasks = [asyncio.ensure_future(self._put(each, asked, turn)) for each in sources]
        try:
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, asked: Asked) -> None:
        """Count the pictures of a request no more: it has been answered."""
        self.num_open_bytes -= asked.num_picture_bytes
        asked.num_picture_bytes = 0

    def _count(self, asked: Asked, num_bytes: int) -> None:
        """Count bytes that the pictures of a request take.

        Raises `HttpProblem`: 413 if they are more than all pictures may take, 503 if so with those of other requests.
        """
        most = self._options.max_open_picture_bytes
        asked.num_picture_bytes += num_bytes
        self.num_open_bytes += num_bytes
        if asked.num_picture_bytes > most:
            advice = "send fewer, or start the server with a larger --max-open-picture-bytes"
            raise HttpProblem(413, f"The request's pictures take more than {most} bytes: {advice}.")
        if self.num_open_bytes > most:
            raise HttpProblem(503, f"Pictures of open requests take {most} bytes: send the request again later.")

    def _turns_here(self) -> "_Turns":
        return self._turns.setdefault(asyncio.get_running_loop(), _Turns())

    async def _put(self, source: Source, asked: Asked, turn: asyncio.Semaphore) -> None:
        async with turn:
            data = await self._load(source, asked)
            found = await self._process(partial(self._read_image, data, source.field))
            source.put(found)
            self._count(asked, found.picture.num_bytes - len(data))

    async def _process(self, function: Callable[[], R]) -> R:
        """The result of a function that decodes and processes a picture; on a thread, a few at a time.

        A call whose client leaves keeps its turn to the end, so that clients that leave cannot begin more of them.
        """
        turns = self._turns_here().processing

        def end(work: "asyncio.Future[R]") -> None:
            turns.release()
            if not work.cancelled():
                work.exception()  # of a client that has left: no caller awaits it

        await turns.acquire()
        work = asyncio.ensure_future(run_in_thread(function))
        work.add_done_callback(end)
        return await asyncio.shield(work)

    async def _load(self, source: Source, asked: Asked) -> bytes:
        """The file of a picture, counted."""
        text, field, scheme = source.text, source.field, source.text[:8].lower()
        most, count = self._options.max_picture_bytes, partial(self._count, asked)
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


class _Turns:
    """Bounds on the work that an event loop has at a time."""

    def __init__(self) -> None:
        self.downloads = asyncio.Semaphore(_MOST_DOWNLOADS)
        self.processing = asyncio.Semaphore(min(max(2, (os.cpu_count() or 1) // 2), _MOST_DECODED))
