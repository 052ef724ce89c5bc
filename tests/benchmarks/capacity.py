"""Holds the capacity simulator against real fleets: processes behind the real client, whose steps sleep what measured
steps have cost, so that more of them than processors run at full speed.

The costs that the simulation uses are fitted to the steps of one replica under another workload than those compared.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout_engine import EngineConfig, SamplingParams
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.base.seeds import child_seed
from rollout_engine.capacity.costs import Fit, StepShape, fit
from rollout_engine.capacity.fleet_file import read_cases
from rollout_engine.capacity.options import FleetFile
from rollout_engine.capacity.simulation import Simulation
from rollout_engine.cli.measured_costs import Measured
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.processes import ProcessProvider

_END = 2
_NUM_RATIOS = 8
_LOAD = 0.75
"""Arriving prompts per second / those that the fleet serves when all are there at once, by the simulation."""
_SEEDS_AT_ONCE = (2, 3)
_SEEDS_ARRIVING = (2, 3, 4, 5, 6, 7, 8, 9)
"""Each case pools workloads of these seeds. Where loads are nearly even, chance decides which replica takes a request:
costs 4 % higher alone move the 95th percentile of three such workloads by 11 %."""
_SECONDS = 600.0
_BASE = (
    "engine.max_num_seqs=16", "engine.max_prefill_beside_decode=512", "engine.num_kv_blocks=2048",
    "workload.num_batches=1", "workload.samples_per_prompt=4", "training.train_seconds=0", "weights.gigabytes=0",
    "weights.commit_seconds=0",
)  # fmt: skip
_LEARN = (
    "fleet.num_replicas=1", "workload.prompts_per_batch=24", "workload.prompt_tokens.median=50",
    "workload.prompt_tokens.p95=150", "workload.prompt_tokens.most=200", "workload.output_tokens.median=24",
    "workload.output_tokens.p95=48", "workload.output_tokens.most=80", "seed=1",
)  # fmt: skip
_COMPARE = (
    "workload.samples_per_request=1", "workload.prompt_tokens.median=80", "workload.prompt_tokens.p95=160",
    "workload.prompt_tokens.most=240", "workload.output_tokens.median=30", "workload.output_tokens.p95=80",
    "workload.output_tokens.most=120",
)  # fmt: skip
_PROMPTS_PER_REPLICA = 12
_BALANCERS = {"requests": '["requests"]', "prefix-aware": '["prefix-aware", "requests"]'}


class _SleepingProcesses(ProcessProvider):
    """Processes that need no processor of their own."""

    def check(self, num_more: int, config: EngineConfig, num_present: int = 0) -> None:
        pass


class _Ends:
    """Hears when requests end: each is `num_samples` sequences, with ids from `first` on."""

    def __init__(self, first: int, num_samples: int, num_requests: int) -> None:
        self._first, self._num_samples = first, num_samples
        self._left = [num_samples] * num_requests
        self.ended_at = [0.0] * num_requests
        self.error: Exception | None = None
        self._num_open, self.is_over = num_requests, threading.Event()

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        for end in outputs.ended:
            assert end.finish_reason == "stop", end
            number = (end.sequence_id - self._first) // self._num_samples
            self._left[number] -= 1
            if not self._left[number]:
                self.ended_at[number] = time.monotonic()
                self._num_open -= 1
        if not self._num_open:
            self.is_over.set()

    def refuse(self, first_sequence_id: int, error: Exception) -> None:
        self.fail_all(error)

    def fail_all(self, error: Exception) -> None:
        self.error = error
        self.is_over.set()


class _Seen(NamedTuple):
    """One run: predicted, or measured."""

    num_tokens: int
    seconds: float
    latencies: np.ndarray
    """Of each request, in seconds."""


class SleepingFleet:
    """A real fleet of processes whose steps sleep."""

    def __init__(self, client: FleetClient, measured: Measured) -> None:
        self._client, self._measured, self._next_id = client, measured, 0

    def run(self, simulation: Simulation) -> _Seen:
        """Serve a simulation's workload, as long and as late as there."""
        workload, first = simulation.workload, self._next_id
        n, jobs = workload.num_samples, workload.jobs
        self._next_id += n * len(jobs)
        seeds = {
            str(child_seed(first + i, j)): each for i, job in enumerate(jobs) for j, each in enumerate(job.lengths)
        }
        self._call("begin_sleeping", [*self._measured.fit.costs], _ratios(self._measured), seeds)
        ends = _Ends(first, n, len(jobs))
        self._client.listen(ends)
        arrives = simulation.file.workload.arrives
        coming = list(workload.arrivals(simulation.file.seed)) if arrives else [(0.0, workload.batches[0])]
        start, submitted_at = time.monotonic(), [0.0] * len(jobs)
        for at, numbers in coming:
            time.sleep(max(start + at - time.monotonic(), 0.0))
            for number in numbers:
                submitted_at[number] = time.monotonic()
                self._client.add_request(_request(simulation, number, first))
        if not ends.is_over.wait(_SECONDS) or ends.error is not None:
            raise RuntimeError(f"the fleet did not serve its requests: {ends.error}")
        self._client.check_integrity()
        self._client.call("reset_prefix_cache", dict(reset_running_requests=False)).result()
        seconds = np.array(ends.ended_at) - np.array(submitted_at)
        return _Seen(workload.num_tokens, max(ends.ended_at) - start, seconds)

    def steps(self) -> list[list[float]]:
        """(rows, prefill tokens, context tokens, seconds) of each step of the last run."""
        return [step for replica in self._call("slept_steps") for step in replica]

    def _call(self, method: str, *arguments: Any) -> Any:
        call = dict(method=method, timeout=None, args=arguments, kwargs={})
        return self._client.call("collective_rpc", call).result()


@contextlib.contextmanager
def sleeping_fleet(checkpoint: Path, measured: Measured, file: FleetFile) -> Iterator[SleepingFleet]:
    """Start a fleet for the tables [fleet] and [engine] of a file; it ends with the block."""
    config = EngineConfig(
        model=str(checkpoint),
        worker_extensions=("sleeping_steps:SleepingSteps",),
        skip_tokenizer_init=True,
        log_stats=False,
        num_threads=1,
        max_num_seqs=file.engine.max_num_seqs,
        num_kv_blocks=file.engine.num_kv_blocks,
        enable_prefix_caching=file.engine.enable_prefix_caching,
    )
    client = FleetClient.start(
        config,
        num_replicas=file.fleet.num_replicas,
        provider=_SleepingProcesses(hang_seconds=60.0),
        balancer=file.fleet.make_balancer(),
    )
    try:
        yield SleepingFleet(client, measured)
    finally:
        client.shutdown()


def learn(checkpoint: Path, measured: Measured) -> Fit:
    """Fit costs to the steps of one replica under a workload of its own."""
    simulation = Simulation(_file(_LEARN))
    with sleeping_fleet(checkpoint, measured, simulation.file) as fleet:
        fleet.run(simulation)
        steps = fleet.steps()
    shapes = [StepShape(*map(int, step[:3])) for step in steps]
    return fit(shapes, [step[3] for step in steps])


def compare(checkpoint: Path, measured: Measured, learned: Fit, num_replicas: int) -> dict[str, Any]:
    """Predicted and measured throughput and 95th percentile of request latency, for each balancer, with and without
    prefix sharing, with all requests at once and as they arrive."""
    found: dict[str, Any] = {}
    for balancer, strategies in _BALANCERS.items():
        for sharing in (True, False):
            options = (
                *_COMPARE, f"fleet.num_replicas={num_replicas}", f"fleet.balancer={strategies}",
                f"engine.enable_prefix_caching={str(sharing).lower()}",
                f"workload.prompts_per_batch={_PROMPTS_PER_REPLICA * num_replicas}",
                *(f"costs.{name}={value}" for name, value in learned.costs._asdict().items()),
            )  # fmt: skip
            together = [Simulation(_file((*options, f"seed={seed}"))) for seed in _SEEDS_AT_ONCE]
            predicted = [_predict(each) for each in together]
            num_prompts = sum(len(each.workload.prompt_lengths) for each in together)
            rate = _LOAD * num_prompts / sum(each.seconds for each in predicted)
            late = (*options, f"workload.requests_per_second={rate}")
            arriving = [Simulation(_file((*late, f"seed={seed}"))) for seed in _SEEDS_ARRIVING]
            name = f"{balancer}, {'prefixes shared' if sharing else 'not shared'}"
            with sleeping_fleet(checkpoint, measured, together[0].file) as fleet:
                found[f"{name}, at once"] = _compared(predicted, [fleet.run(each) for each in together])
                found[f"{name}, arriving"] = _compared(
                    [_predict(each) for each in arriving], [fleet.run(each) for each in arriving]
                )
    errors = {key: max(abs(each[key]) for each in found.values()) for key in ("tokens_per_second_error", "p95_error")}
    return {
        **{f"largest_{key}": value for key, value in errors.items()},
        "cases": found,
        "costs": learned.costs._asdict(),
        "fit_p95_error": round(learned.p95_error, 4),
        "measured_p95_error": round(measured.fit.p95_error, 4),
        "ratios": [[round(each, 3) for each in ratio] for ratio in _ratios(measured)],
    }


def _file(options: tuple[str, ...]) -> FleetFile:
    return read_cases(None, [*_BASE, *options])[0].file


def _request(simulation: Simulation, number: int, first: int) -> EngineCoreRequest:
    made = simulation.workload.request(number)
    return msgspec.structs.replace(
        made,
        prompt_token_ids=list(made.prompt_token_ids),
        params=SamplingParams(n=simulation.workload.num_samples),
        seed=first + number,
        first_sequence_id=first + made.first_sequence_id,
        eos_token_ids=[_END],
    )


def _ratios(measured: Measured) -> list[list[float]]:
    """(context tokens, median of measured / by the costs) of steps in order of their contexts."""
    ordered = sorted(measured.steps, key=lambda step: step[0].num_context_tokens)
    parts = [part for part in np.array_split(np.arange(len(ordered)), _NUM_RATIOS) if len(part)]
    costs = measured.fit.costs
    return [
        [
            float(ordered[part[-1]][0].num_context_tokens),
            float(np.median([ordered[i][1] / costs.seconds(ordered[i][0]) for i in part])),
        ]
        for part in parts
    ]


def _predict(simulation: Simulation) -> _Seen:
    simulation.run()
    jobs = simulation.workload.jobs
    latencies = np.array([job.ended_at - job.submitted_at for job in jobs])
    return _Seen(simulation.workload.num_tokens, max(job.ended_at for job in jobs), latencies)


def _pooled(runs: list[_Seen]) -> dict[str, float]:
    p50, p95 = np.quantile(np.concatenate([run.latencies for run in runs]), (0.5, 0.95))
    rate = sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)
    return {"tokens_per_second": rate, "p50_seconds": p50, "p95_seconds": p95}


def _compared(predictions: list[_Seen], runs: list[_Seen]) -> dict[str, Any]:
    predicted, seen = _pooled(predictions), _pooled(runs)
    names = ("tokens_per_second", "p50_seconds", "p95_seconds")
    return {
        **{f"{name}_predicted": round(predicted[name], 3) for name in names},
        **{f"{name}_measured": round(seen[name], 3) for name in names},
        "tokens_per_second_error": round(predicted["tokens_per_second"] / seen["tokens_per_second"] - 1, 4),
        "p50_error": round(predicted["p50_seconds"] / seen["p50_seconds"] - 1, 4),
        "p95_error": round(predicted["p95_seconds"] / seen["p95_seconds"] - 1, 4),
    }
