"""What a request of a session costs beyond the same request outside of sessions.

64 agents, each with a conversation of 8 turns that grows by 130 tokens a turn, over an engine that samples at once.
The whole conversation is sent to a session, which continues behind the sampled ids and records the answer, or to the
server's own chat route, which renders and encodes it anew. `cost_ms` is the difference of CPU milliseconds a request,
the median of rounds that take turns; `share_ms` is the part that the gateway's own functions take (matching, prompt,
record, copies), measured around them.

    python tests/benchmarks/gateway.py
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from instant_engine import InstantClient

from rollout_engine import LLM, AsyncLLM
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.sessions.call import SessionCall
from rollout_engine.testing import tiny_checkpoint

NUM_SESSIONS, NUM_TURNS = 64, 8
_NUM_SAMPLED = 40
_WORDS = "Please look at the next file and tell me what it does. "
_ROUNDS = 5


def measure(rounds: int = _ROUNDS) -> dict[str, Any]:
    """CPU milliseconds a request in both ways, and their difference."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(Path(folder))
        with LLM(path, max_model_len=2048, log_stats=False, kv_cache_bytes=1 << 26) as llm:
            info = llm.llm_engine.frontend.client.info
        app = App(AsyncLLM.from_client(InstantClient(info)), ServeOptions(sessions=True))
        found: dict[str, list[float]] = {"plain": [], "session": [], "share": []}
        for index in range(rounds + 1):
            for name in ("plain", "session")[:: 1 if index % 2 else -1]:
                with _clocked() as spent:
                    seconds = asyncio.run(_play(app, in_session=name == "session"))
                if index:  # the first warms up
                    found[name].append(1000 * seconds / (NUM_SESSIONS * NUM_TURNS))
                if index and name == "session":
                    found["share"].append(1000 * spent["seconds"] / (NUM_SESSIONS * NUM_TURNS))
    medians = {f"{name}_ms": round(statistics.median(values), 3) for name, values in found.items()}
    costs = [each - plain for each, plain in zip(found["session"], found["plain"], strict=True)]
    return {"cost_ms": round(statistics.median(costs), 3), **medians, "rounds": [round(each, 3) for each in costs]}


async def _play(app: App, *, in_session: bool) -> float:
    """CPU seconds of all requests, 64 at a time."""
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        made = [(await client.post("/sessions", json={})).json() for _ in range(NUM_SESSIONS)]
        start = time.process_time()
        await asyncio.gather(*(_converse(client, session, in_session) for session in made))
        seconds = time.process_time() - start
        for session in made:
            await client.delete(f"/sessions/{session['id']}")
    return seconds


async def _converse(client: Any, session: dict[str, str], in_session: bool) -> None:
    url = f"{session['openai_base_url']}/chat/completions" if in_session else "/v1/chat/completions"
    headers, messages = {"x-api-key": session["api_key"]}, list[dict[str, Any]]()
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"{session['id']} {turn} {_WORDS}"})
        response = await client.post(url, json={"messages": messages, "max_tokens": _NUM_SAMPLED}, headers=headers)
        assert response.status_code == 200, response.text
        messages.append(response.json()["choices"][0]["message"])


@contextmanager
def _clocked() -> Any:
    """Seconds in the gateway's own functions, the rendering and encoding of prompts included."""
    spent, begin, record = {"seconds": 0.0}, SessionCall.begin, SessionCall.record

    async def timed_begin(self: SessionCall, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return await begin(self, *args, **kwargs)
        finally:
            spent["seconds"] += time.perf_counter() - start

    def timed_record(self: SessionCall, *args: Any) -> None:
        start = time.perf_counter()
        record(self, *args)
        spent["seconds"] += time.perf_counter() - start

    SessionCall.begin, SessionCall.record = timed_begin, timed_record  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        SessionCall.begin, SessionCall.record = begin, record  # type: ignore[method-assign]


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    print()
