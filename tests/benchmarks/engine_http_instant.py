"""The HTTP server over an engine that samples at once, as a worker serves it."""

import gc
import resource
import time
from typing import Any

import psutil
from instant_engine import InstantClient
from works import KV_POOL_BYTES

from rollout_engine import LLM, AsyncLLM
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        options = dict(dtype=dtype, load_format="dummy", skip_tokenizer_init=True, kv_cache_bytes=KV_POOL_BYTES)
        with LLM(directory, log_stats=False, **options) as llm:
            info = llm.llm_engine.frontend.client.info
        self._servers = {
            answers: HttpServer(
                AsyncLLM.from_client(InstantClient(info, answers=answers)), ServeOptions(port=0)
            ).__enter__()
            for answers in (True, False)
        }

    def address(self, answers: bool) -> list[Any]:
        """Host and port of the server whose engine answers, or of the one whose streams stay open."""
        host, port = self._servers[answers].url.removeprefix("http://").split(":")
        return [host, int(port)]

    def cpu_seconds(self) -> float:
        """CPU time of this process so far, of all its threads."""
        return time.process_time()

    def num_bytes(self) -> int:
        """Resident memory."""
        gc.collect()
        return psutil.Process().memory_info().rss

    def num_open(self) -> int:
        """Requests of clients that are open."""
        return self._servers[False].app.served.num_open
