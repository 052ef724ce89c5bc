"""The figures of this engine beside its peers', and what its features cost.

python tests/benchmarks/run.py                                       everything, against everybody: half an hour
python tests/benchmarks/run.py S M --peers vllm,generate --rounds 2  two shapes against two peers
python tests/benchmarks/run.py costs updates memory startup host balancer capacity fleet attention training   ours alone
python tests/benchmarks/run.py latents --rounds 8                    a layer of DeepSeek over latents and expanded keys
python tests/benchmarks/run.py recurrences                           layers with a state against steps in torch
python tests/benchmarks/run.py hybrids                               models with states beside dense ones, and training
python tests/benchmarks/run.py mixers                                their layers as one call against modules
python tests/benchmarks/run.py episodes                              how busy environments keep the engine
python tests/benchmarks/run.py http                                  what the HTTP server adds to the engine
python tests/benchmarks/run.py speculation --rounds 7                what drafted tokens bring
python tests/benchmarks/run.py lora --rounds 7                       what LoRA adapters cost
python tests/benchmarks/run.py structured --rounds 9                 what structured outputs cost
python tests/benchmarks/run.py int8 --rounds 5                       what weights rounded to int8 gain and cost
python tests/benchmarks/run.py teachers --rounds 5                   what the columns of a teacher cost
python tests/benchmarks/run.py gateway --rounds 5                    what sessions add to a request

`--peers vllm` needs an environment made by make_vllm_cpu.sh. Measure on a quiet machine: what other processes use is
printed and kept with each figure. Results are added to tests/benchmarks/results/<machine>/<date>.json.
"""

import argparse
import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import arrivals
import attention
import balancer
import capacity
import costs
import draft_model
import episodes
import fleet
import gateway
import host
import http_server
import hybrids
import latents
import loras
import memory
import mixers
import own_process
import psutil
import recurrences
import results
import rounding
import speculation
import startup
import structured
import teachers
import throughput
import torch
import training
from prompts import FreshPrompts
from workers import HERE, ROOT, Worker
from works import SHAPES, WORKS, figure_name, write_config

from rollout_engine.cli import measured_costs
from rollout_engine.cli.ceilings import Work
from rollout_engine.testing import tiny_checkpoint

PEERS = ("vllm", "generate", "generate_batch")
_BUSY_PERCENT = 6.0


class Run:
    """Options of one run, and where its models and results are."""

    def __init__(self, arguments: argparse.Namespace, models: Path) -> None:
        self.peers: list[str] = arguments.peers
        self.rounds: int = arguments.rounds
        self._vllm_python = str(arguments.vllm.absolute() / "bin" / "python")
        self.models, self._results = models, arguments.results
        # Without the places of one machine.
        self._command = f"run.py {' '.join(arguments.parts)} --peers '{','.join(self.peers)}' --rounds {self.rounds}"

    def directory(self, shape: str) -> Path:
        return write_config(self.models / shape, shape)

    @contextlib.contextmanager
    def workers(self, shape: str, peers: list[str]) -> Iterator[dict[str, Worker]]:
        """Ours and `peers`, started one after the other; ended together."""
        with self.only(shape, [throughput.OURS, *peers]) as started:
            yield started

    @contextlib.contextmanager
    def only(self, shape: str, names: list[str]) -> Iterator[dict[str, Worker]]:
        """As `workers`, without ours unless named."""
        with contextlib.ExitStack() as stack:
            started = {}
            for name in names:
                python = {"python": self._vllm_python} if name.startswith("vllm") else {}
                started[name] = Worker(name, self.directory(shape), SHAPES[shape]["dtype"], **python)
                stack.callback(started[name].close)
            yield started

    def keep(self, name: str, measured: Callable[[], dict[str, Any]]) -> None:
        """Measure, print and save one figure."""
        busy = psutil.cpu_percent(interval=1.0)
        warning = f"   (others use {busy:.0f} % of this machine)" if busy > _BUSY_PERCENT else ""
        print(f"\n{name}{warning}", flush=True)
        figure = measured() | {"busy_percent_before": busy}
        for key, value in figure.items():
            print(f"  {key:28} {json.dumps(value)}", flush=True)
        results.save(self._results, name, figure, self._versions(), self._command)

    def _versions(self) -> dict[str, str]:
        if "vllm" not in self.peers:
            return {}
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        done = subprocess.run([self._vllm_python, "-c", code], check=True, capture_output=True, text=True)
        return {"vllm-cpu": done.stdout.strip()}


def measure_throughput(run: Run, shape: str) -> None:
    prompts = FreshPrompts(SHAPES[shape]["vocab_size"])
    with run.workers(shape, run.peers) as workers:
        for work in WORKS[shape]:
            run.keep(figure_name(shape, work), lambda w=work: throughput.measure(workers, w, prompts, run.rounds))


def measure_costs(run: Run) -> None:
    work = WORKS["L"][0]
    prompts = FreshPrompts(SHAPES["L"]["vocab_size"])
    with run.workers("L", []) as workers:
        ours = workers[throughput.OURS]
        run.keep("log-probs, L", lambda: costs.of_logprobs(ours, work, prompts, run.rounds))
        run.keep("top-p 0.95, L", lambda: costs.of_top_p(ours, work, prompts, run.rounds))


def measure_updates(run: Run) -> None:
    work = Work(8, 8, 64, 160)
    prompts = FreshPrompts(SHAPES["M"]["vocab_size"])
    with run.workers("M", []) as workers:
        ours = workers[throughput.OURS]
        run.keep("update every 64 steps, M", lambda: costs.of_updates(ours, work, prompts, run.rounds))


def measure_memory(run: Run) -> None:
    for shape in SHAPES:
        directory, dtype, work = run.directory(shape), SHAPES[shape]["dtype"], WORKS[shape][0]
        run.keep(f"memory, {shape}", lambda d=directory, t=dtype, w=work: memory.measure(d, t, w))


def measure_startup(run: Run) -> None:
    run.keep("import rollout_engine", startup.of_import)
    run.keep("LLM(), S", lambda: startup.of_engine(run.directory("S"), SHAPES["S"]["dtype"]))


def measure_host(run: Run) -> None:
    for num_requests in (64, 256):
        run.keep(f"host, {num_requests} requests", lambda n=num_requests: host.measure(n, run.rounds))


def measure_balancer(run: Run) -> None:
    for num_replicas in (10, 1000):
        run.keep(f"balancer, {num_replicas} replicas", lambda n=num_replicas: balancer.measure(n, run.rounds))


def measure_capacity(run: Run) -> None:
    options = dict(load_format="dummy", dtype=SHAPES["M"]["dtype"], num_threads=1, max_num_seqs=16, max_model_len=320)
    measured = measured_costs.measure(str(run.directory("M")), options)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(folder, max_position_embeddings=1024)
        learned = capacity.learn(checkpoint, measured)
        for num_replicas in (2, 4):
            name = f"capacity, {num_replicas} replicas that sleep the steps of M"
            run.keep(name, lambda n=num_replicas: capacity.compare(checkpoint, measured, learned, n))


def measure_attention(run: Run) -> None:
    run.keep("attention, decoding", lambda: attention.measure(run.rounds, 1 << 30))


def measure_latents(run: Run) -> None:
    run.keep("latents against expanded keys and values", lambda: latents.measure(run.rounds))


def measure_recurrences(run: Run) -> None:
    run.keep("recurrences against steps in torch", lambda: recurrences.measure(run.rounds))


def measure_hybrids(run: Run) -> None:
    prompts = FreshPrompts(hybrids.VOCABULARY)
    for case in hybrids.CASES:
        paths = hybrids.write_configs(run.models, case)
        engines = hybrids.Engines(paths)
        run.keep(f"hybrid / dense, {case}, decode", lambda e=engines: e.decode(prompts, run.rounds))
        run.keep(f"hybrid / dense, {case}, prompt", lambda e=engines: e.prefill(prompts, run.rounds))
        engines.close()
        name = f"training step, hybrid, {case}"
        run.keep(name, lambda p=paths["hybrid"]: training.measure(p, torch.bfloat16, run.rounds))


def measure_mixers(run: Run) -> None:
    prompts = FreshPrompts(mixers.VOCABULARY)
    for model_type in mixers.TYPES:
        engines = mixers.Engines(model_type, run.models / model_type)
        for count in mixers.NUM_SEQUENCES:
            name = f"one call / modules, {model_type}, {count} sequence{'s' if count > 1 else ''}"
            run.keep(name, lambda e=engines, n=count: e.decode(prompts, n, run.rounds))
        engines.close()


def measure_training(run: Run) -> None:
    for name, (shape, dtype) in training.CASES.items():
        run.keep(f"training step, {name}", lambda s=shape, d=dtype: training.measure(run.directory(s), d, run.rounds))


def measure_own_process(run: Run) -> None:
    for shape in ("S", "M"):
        prompts, work = FreshPrompts(SHAPES[shape]["vocab_size"]), WORKS[shape][0]
        with run.workers(shape, ["async"]) as workers:
            ours, other = workers[throughput.OURS], workers["async"]
            name = f"own process, {figure_name(shape, work)}"
            run.keep(name, lambda o=ours, a=other, w=work, p=prompts: own_process.throughput(o, a, w, p, run.rounds))
            run.keep(f"pause, {shape}", lambda a=other, p=prompts: own_process.pauses(a, p, run.rounds))
            run.keep(f"pause in process, {shape}", lambda o=ours, p=prompts: own_process.pauses(o, p, run.rounds))
            if shape == "S":
                run.keep("own process, 256 streams", lambda a=other, p=prompts: own_process.streams(a, p, run.rounds))
                run.keep("own process, killed", lambda a=other, p=prompts: own_process.kills(a, p, run.rounds))


def measure_fleet(run: Run) -> None:
    for shape in ("S", "M"):
        directory, dtype, work = run.directory(shape), SHAPES[shape]["dtype"], WORKS[shape][0]
        prompts = FreshPrompts(SHAPES[shape]["vocab_size"])
        with fleet.engine(directory, dtype, 0) as alone, fleet.engine(directory, dtype, 1) as one:
            name = f"fleet of one / alone, {figure_name(shape, work)}"
            run.keep(name, lambda a=alone, o=one, w=work, p=prompts: fleet.throughput(a, o, w, p, run.rounds))
        with fleet.engine(directory, dtype, 0, 2) as alone, fleet.engine(directory, dtype, 2, 1) as two:
            name = f"two replicas of one thread / one of two, {figure_name(shape, work)}"
            run.keep(name, lambda a=alone, t=two, w=work, p=prompts: fleet.throughput(a, t, w, p, run.rounds))
            if shape == "S":
                run.keep("prefix hits, 64 groups x 8", lambda a=alone, t=two, p=prompts: fleet.prefix_hits(a, t, p))
    run.keep("push to four replicas, M", lambda: fleet.push(directory, dtype, run.rounds))


def measure_episodes(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder, episodes.policy(Path(folder)) as policy:
        for where, environment in episodes.ENVIRONMENTS.items():
            name = f"{episodes.NUM_EPISODES} episodes {where}, S"
            run.keep(name, lambda e=environment: episodes.measure(policy, e, run.rounds))


def measure_gateway(run: Run) -> None:
    run.keep("a request of a session, 64 x 8 turns", lambda: gateway.measure(run.rounds))


def measure_http(run: Run) -> None:
    prompts = FreshPrompts(SHAPES["S"]["vocab_size"])
    with run.only("S", ["http", "http_load"]) as workers:
        served, clients = workers["http"], workers["http_load"]
        name = "HTTP / direct, S, 64 clients, 512+256"
        run.keep(name, lambda: http_server.throughput(served, clients, prompts, run.rounds))
        run.keep("HTTP first byte, S", lambda: http_server.first_byte(served, clients, prompts, run.rounds))
    with run.only("S", ["http_instant", "http_load"]) as workers:
        instant, clients = workers["http_instant"], workers["http_load"]
        run.keep("HTTP requests, instant engine", lambda: http_server.requests(instant, clients, prompts, run.rounds))
        run.keep("HTTP, 10,000 idle streams", lambda: http_server.idle_streams(instant, clients, prompts))


def measure_arrivals(run: Run) -> None:
    prompts = FreshPrompts(SHAPES["M"]["vocab_size"])
    peers = ["vllm_async"] if "vllm" in run.peers else []
    dtype = getattr(torch, SHAPES["M"]["dtype"])
    ceilings = {kind: arrivals.by_products(run.directory("M"), dtype, mix) for kind, mix in arrivals.MIXES.items()}
    with run.only("M", ["async", *peers]) as workers:
        for kind, mix in arrivals.MIXES.items():
            ceiling = {"tokens_per_second_by_gemm": ceilings[kind]}
            name = f"arrivals{kind}, M, {arrivals.NUM_REQUESTS} requests"
            run.keep(name, lambda m=mix, c=ceiling: arrivals.measure(workers, prompts, m, run.rounds) | c)


def measure_speculation(run: Run) -> None:
    for shape, cases in speculation.CASES.items():
        engine = speculation.Engine(run.directory(shape), SHAPES[shape]["dtype"])
        prompts = FreshPrompts(SHAPES[shape]["vocab_size"])
        for case in cases:
            name = f"speculation / without, {shape} {case}"
            run.keep(name, lambda e=engine, c=case, p=prompts: speculation.measure(e, c, p, run.rounds))


def measure_draft_model(run: Run) -> None:
    paths = draft_model.write_models(run.models / "draft_model")
    for kind in ("good", "never"):
        engine, prompts = draft_model.Engine(paths, kind), FreshPrompts(draft_model.SHAPE["vocab_size"])
        for case in (each for each in draft_model.CASES if each.draft == kind):
            name = f"draft model / without, {case}"
            run.keep(name, lambda e=engine, c=case, p=prompts: draft_model.measure(e, c, p, run.rounds))
        engine.close()


def measure_loras(run: Run) -> None:
    engine = loras.Engine(run.directory("M"), SHAPES["M"]["dtype"])
    prompts = FreshPrompts(SHAPES["M"]["vocab_size"])
    name = f"LoRA / base, M, {loras.NUM_REQUESTS} requests, rank {loras.RANK}"
    run.keep(name, lambda: loras.measure(engine, prompts, run.rounds))
    run.keep(f"LoRA push, M, rank {loras.RANK}", lambda: loras.measure_pushes(engine, prompts, run.rounds))


def measure_structured(run: Run) -> None:
    prompts = FreshPrompts(SHAPES["S"]["vocab_size"])
    for is_trained in (False, True):
        engine = structured.Engine(run.models / ("S, trained" if is_trained else "S"), is_trained)
        for form in ["json"] if is_trained else structured.FORMS:
            name = structured.name_of(form, is_trained)
            run.keep(name, lambda e=engine, f=form, p=prompts: structured.measure(e, f, p, run.rounds))
        engine.close()


def measure_int8(run: Run) -> None:
    engines = rounding.Engines(run.directory("M"))
    prompts = FreshPrompts(SHAPES["M"]["vocab_size"])
    for num in rounding.BATCHES:
        name = f"int8 / exact, M, {num} sequence{'s' if num > 1 else ''}"
        run.keep(name, lambda n=num: engines.rates(n, prompts, run.rounds))
    for dtype in rounding.DTYPES:
        run.keep(f"int8, log-probs, M, {dtype}", lambda d=dtype: engines.differences(d, prompts))
        run.keep(f"int8, megabytes, M, {dtype}", lambda d=dtype: engines.megabytes(d))
    engines.close()


def measure_teachers(run: Run) -> None:
    directory, dtype = run.directory("M"), SHAPES["M"]["dtype"]
    for work in WORKS["M"]:
        name = f"teacher columns / rollout, {figure_name('M', work)}"
        run.keep(name, lambda w=work: teachers.measure(directory, dtype, w, run.rounds))


PARTS: dict[str, Callable[[Run], None]] = {
    **{shape: lambda run, s=shape: measure_throughput(run, s) for shape in SHAPES},
    "costs": measure_costs,
    "updates": measure_updates,
    "memory": measure_memory,
    "startup": measure_startup,
    "host": measure_host,
    "balancer": measure_balancer,
    "capacity": measure_capacity,
    "attention": measure_attention,
    "latents": measure_latents,
    "recurrences": measure_recurrences,
    "hybrids": measure_hybrids,
    "mixers": measure_mixers,
    "training": measure_training,
    "own_process": measure_own_process,
    "fleet": measure_fleet,
    "episodes": measure_episodes,
    "arrivals": measure_arrivals,
    "http": measure_http,
    "speculation": measure_speculation,
    "draft_model": measure_draft_model,
    "lora": measure_loras,
    "structured": measure_structured,
    "int8": measure_int8,
    "teachers": measure_teachers,
    "gateway": measure_gateway,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=f"of {' '.join(PARTS)}; all without")
    parser.add_argument(
        "--peers", type=_peers, default=[*PEERS], help=f"of {','.join(PEERS)}; all without, '' for none"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, default=ROOT / "build" / "vllm-cpu", help="environment of vllm-cpu")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as models:
        run = Run(arguments, Path(models))
        for part in arguments.parts:
            PARTS[part](run)


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"no such peer: {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
