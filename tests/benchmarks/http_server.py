"""What the HTTP server costs beside the engine that it serves.

The clients are a process of their own, and the engine's core another: on two cores the three share them, as they do
where a trainer and an engine live on one machine. `throughput` and `first_byte` compare with `AsyncLLM`, called in the
server's own process by as many coroutines; `requests` and `idle_streams` have an engine behind them that samples at
once, so that the server alone is measured.
"""

import statistics
from typing import Any

from prompts import FreshPrompts
from workers import Worker

_PATH = "/v1/completions"
_NUM_CLIENTS, _NUM_PROMPT_TOKENS, _NUM_SAMPLED = 64, 512, 256
_REQUESTS_EACH = 2
_NUM_FIRST, _FIRST_PROMPT_TOKENS, _FIRST_SAMPLED = 100, 32, 8
_NUM_QUICK, _QUICK_PROMPT_TOKENS = 20_000, 16
_NUM_STREAMS = 10_000


def throughput(served: Worker, clients: Worker, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """`ratio`: tokens per second over HTTP / by `AsyncLLM`, the median over rounds that take turns."""
    address, num_requests = served.ask("address")["answer"], _NUM_CLIENTS * _REQUESTS_EACH
    seconds: dict[str, list[float]] = {"http": [], "direct": []}
    num_bytes = 0
    for i in range(rounds + 1):  # the first warms up
        for name in list(seconds)[:: 1 if i % 2 else -1]:
            drawn = prompts.draw(num_requests, _NUM_PROMPT_TOKENS)
            if name == "direct":
                reply = served.ask("direct", prompts=drawn, num_sampled=_NUM_SAMPLED, num_clients=_NUM_CLIENTS)
            else:
                bodies = [_body(prompt, _NUM_SAMPLED) for prompt in drawn]
                reply = clients.ask("send", address=address, path=_PATH, bodies=bodies, num_connections=_NUM_CLIENTS)
                num_bytes = reply["answer"]["num_bytes"]
            seconds[name].append(reply["answer"]["seconds"])
    pairs = list(zip(seconds["http"][1:], seconds["direct"][1:], strict=True))
    ratios, num_tokens = [direct / http for http, direct in pairs], num_requests * _NUM_SAMPLED
    return {
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "tokens_per_second": {
            name: round(num_tokens / statistics.median(values[1:]), 1) for name, values in seconds.items()
        },
        "bytes_per_token": round(num_bytes / num_tokens, 1),
    }


def first_byte(served: Worker, clients: Worker, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Milliseconds to the first byte of a stream, one request at a time, and how many of them the server adds."""
    address = served.ask("address")["answer"]
    first: dict[str, list[float]] = {"http": [], "direct": []}
    for i in range(rounds + 1):
        drawn = prompts.draw(2 * _NUM_FIRST, _FIRST_PROMPT_TOKENS)
        direct = served.ask("direct", prompts=drawn[:_NUM_FIRST], num_sampled=_FIRST_SAMPLED, num_clients=1)["answer"]
        bodies = [_body(prompt, _FIRST_SAMPLED, stream=True) for prompt in drawn[_NUM_FIRST:]]
        http = clients.ask("send", address=address, path=_PATH, bodies=bodies, num_connections=1)["answer"]
        if i:
            first["direct"] += direct["first_outputs"]
            first["http"] += http["first_bytes"]
    medians = {name: 1000 * statistics.median(values) for name, values in first.items()}
    return {
        "beyond_direct_ms": round(medians["http"] - medians["direct"], 3),
        "p50_ms": {name: round(value, 3) for name, value in medians.items()},
        "p90_ms": {name: round(1000 * statistics.quantiles(values, n=10)[-1], 3) for name, values in first.items()},
    }


def requests(instant: Worker, clients: Worker, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Requests a second of 64 clients, whole answers of one token and streams of eight, the median of rounds.

    `*_cpu_us`: CPU microseconds of a request in the server's process and in the clients', which say more than rates
    where other processes use the machine.
    """
    address = instant.ask("address", answers=True)["answer"]
    found: dict[str, Any] = {}
    for kind, (num_sampled, more) in {"requests": (1, {}), "streams": (8, {"stream": True})}.items():
        rates, cpu = [], {"server": list[float](), "clients": list[float]()}
        for i in range(rounds + 1):
            drawn = prompts.draw(_NUM_QUICK if i else _NUM_QUICK // 10, _QUICK_PROMPT_TOKENS)
            bodies = [_body(prompt, num_sampled, **more) for prompt in drawn]
            before = instant.ask("cpu_seconds")["answer"]
            answer = clients.ask("send", address=address, path=_PATH, bodies=bodies, num_connections=_NUM_CLIENTS)
            rates.append(len(bodies) / answer["answer"]["seconds"])
            cpu["server"].append(1e6 * (instant.ask("cpu_seconds")["answer"] - before) / len(bodies))
            cpu["clients"].append(1e6 * answer["answer"]["cpu_seconds"] / len(bodies))
        found[f"{kind}_per_second"] = round(statistics.median(rates[1:]))
        found[f"{kind}_cpu_us"] = {name: round(statistics.median(values[1:]), 1) for name, values in cpu.items()}
    return found


def idle_streams(instant: Worker, clients: Worker, prompts: FreshPrompts) -> dict[str, Any]:
    """Megabytes (1e6 bytes) that the server holds for 10,000 streams that have begun and wait."""
    address = instant.ask("address", answers=False)["answer"]
    [prompt] = prompts.draw(1, _QUICK_PROMPT_TOKENS)
    body = _body(prompt, _NUM_SAMPLED, stream=True)
    clients.ask("hold", address=address, path=_PATH, body=body, num_connections=100)  # the first import and allocate
    before = instant.ask("num_bytes")["answer"]
    clients.ask("hold", address=address, path=_PATH, body=body, num_connections=_NUM_STREAMS)
    grown, num_open = instant.ask("num_bytes")["answer"] - before, instant.ask("num_open")["answer"]
    assert num_open == _NUM_STREAMS + 100, f"{num_open} streams are open"
    clients.ask("release")
    return {"megabytes": round(grown / 1e6, 1), "kilobytes_each": round(grown / 1e3 / _NUM_STREAMS, 1)}


def _body(prompt: list[int], num_sampled: int, **more: Any) -> dict[str, Any]:
    fields = {"prompt": prompt, "max_tokens": num_sampled, "ignore_eos": True, "logprobs": 0}
    return fields | {"return_token_ids": True} | more
