"""Paths of the engine that are fast on this machine, those that fall back to slower ones, and how to change that."""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rollout_engine import LLM
from rollout_engine.cli import machine
from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import attention, build, gemm

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEVELS = {1: "AVX2", 2: "AVX-512", 3: "AVX-512 BF16", 4: "AMX"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROBED = (1024, 1024)
"""Shape of the weight whose row plan is reported for its dtype."""

_SIGNS: dict[str, "State"] = {
    "more slowly": "falls back",
    "speculation='auto' is off": "falls back",
    "deterministic='auto' is off": "not exact",
    "layers multiply by rounded weights": "not exact",
}
"""Parts of the lines that loading a model logs -> the state that they report."""

State = Literal["fast", "falls back", "missing", "not exact"]


class SpeedPath(NamedTuple):
    """One thing that the engine does, how it runs here, and how to make that faster."""

    what: str
    state: State
    how: str
    fix: str = ""
    """A sentence on what to do; empty if there is nothing to do."""


def speed_paths(kernels: Mapping[str, Any], cuda: str) -> list[SpeedPath]:
    """Examine this machine. `kernels` and `cuda` are the findings of `doctor`."""
    return [
        _describe_compiled(kernels),
        *(_products(dtype) for dtype in _DTYPES),
        *(_attention(dtype) for dtype in _DTYPES[:2]),
        _threads(),
        *_waiting(),
        *_huge_pages(),
        SpeedPath("CUDA device", "fast" if cuda.startswith("yes") else "missing", cuda.partition(": ")[2]),
    ]


def of_model(model: str, options: Mapping[str, Any]) -> list[SpeedPath]:
    """Load a model, and report how its layers run. `options`: fields of `EngineConfig`. Raises `ConfigError`."""
    told = _Told()
    logger = logging.getLogger("rollout_engine")
    level = logger.level
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        with LLM(model, log_stats=False, skip_tokenizer_init=True, **options) as llm:
            choices = llm.frontend.client.info.choices
    finally:
        logger.removeHandler(told)
        logger.setLevel(level)
    fast = "decoder compiled" in choices or "decoder triton" in choices
    layers = "run in one call" if fast else "run one by one, as modules"
    found = [SpeedPath("layers of the model", "fast" if fast else "falls back", f"{layers}. {choices}")]
    for line in told.lines:
        state: State | None = next((state for sign, state in _SIGNS.items() if sign in line), None)
        if state is not None:
            found.append(SpeedPath("model", state, line))
    return found


def table(paths: list[SpeedPath]) -> str:
    """Write one line per path, and below it what to do."""
    lines = []
    for path in paths:
        lines.append(f"{path.state:11} {path.what:22} {path.how}")
        if path.fix:
            lines.append(f"{'':11} {'':22} -> {path.fix}")
    return "\n".join(lines)


class _Told(logging.Handler):
    """Keeps the lines of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def row_plan(dtype: torch.dtype) -> dict[str, Any]:
    """How products of this dtype are made row-invariant, or why they cannot be."""
    try:
        plan = linear.plan_for(torch.zeros(_PROBED, dtype=dtype))
    except linear.NotInvariant as problem:
        return {"problem": str(problem)}
    rows = f"{plan.min_rows} to {plan.max_rows}" if plan.is_bounded else "any number"
    return {"kernel": plan.kernel, "rows at once": rows}


def _describe_compiled(kernels: Mapping[str, Any]) -> SpeedPath:
    if kernels["loaded"]:
        return SpeedPath("C++ kernels", "fast", "built for this CPU, and loaded")
    if kernels["compiler"] is None:
        cure = "xcode-select --install" if build.COMPILER == "clang++" else "Debian and Ubuntu: apt install g++"
        fix = f"Install {build.COMPILER} ({cure}): without it torch replaces the C++ kernels, more slowly."
    else:
        fix = "The C++ kernels do not build or load, for the problem above; torch replaces them, more slowly."
    return SpeedPath("C++ kernels", "falls back", "torch replaces them", fix)


def _products(dtype: torch.dtype) -> SpeedPath:
    name, plan = str(dtype).removeprefix("torch."), row_plan(dtype)
    what = f"products {name}"
    if "problem" in plan:
        fix = f"{dtype} is not served exactly. Use dtype=float32, or deterministic=False."
        return SpeedPath(what, "not exact", plan["problem"], fix)
    is_bf16 = dtype == torch.bfloat16
    if is_bf16 and not {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.instruction_sets()):
        fix = "This CPU has no native bfloat16: dtype=float32 is faster (dtype=auto chooses it)."
        return SpeedPath(what, "falls back", f"kernel {plan['kernel']}, in float32 arithmetic", fix)
    if gemm.is_fast(dtype):
        level = gemm.level(dtype)
        return SpeedPath(what, "fast", f"kernel {plan['kernel']}, {_LEVELS.get(level, f'level {level}')}")
    cure = (
        "dtype=float32 runs by the engine's own kernel." if dtype == torch.float16 and gemm.is_fast(_DTYPES[0]) else ""
    )
    return SpeedPath(what, "falls back", f"kernel {plan['kernel']}, {plan['rows at once']} rows at once", cure)


def _attention(dtype: torch.dtype) -> SpeedPath:
    what = f"attention {str(dtype).removeprefix('torch.')}"
    if attention.supports(dtype):
        return SpeedPath(what, "fast", "compiled; models built like Llama run all layers in one call")
    return SpeedPath(what, "falls back", "torch's, layer by layer", "It needs the C++ kernels.")


def _threads() -> SpeedPath:
    num_threads, num_cpus = torch.get_num_threads(), machine.usable_cpus()
    how = f"{num_threads} threads, {num_cpus} usable CPUs"
    if num_threads > num_cpus:
        fix = "There are more threads than usable CPUs: set num_threads or OMP_NUM_THREADS."
        return SpeedPath("threads", "falls back", how, fix)
    fix = (
        "num_threads=... may use more of them; `rollout-engine tune MODEL` measures it."
        if num_threads < num_cpus
        else ""
    )
    return SpeedPath("threads", "fast" if not fix else "falls back", how, fix)


def _waiting() -> Iterator[SpeedPath]:
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        yield SpeedPath("waiting threads", "fast", "they sleep: best beside other programs, a third slower alone")
    elif hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > machine.usable_cpus():
        fix = "export OMP_WAIT_POLICY=PASSIVE before Python starts: threads that spin hold up those they wait for."
        yield SpeedPath("waiting threads", "falls back", f"they spin, and the machine's load is {load:.1f}", fix)


def _huge_pages() -> Iterator[SpeedPath]:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return
    if "[never]" in text:
        fix = f"echo madvise | sudo tee {_HUGE_PAGES}: packed weights are then read by fewer pages."
        yield SpeedPath("huge pages", "falls back", "the system grants none", fix)
    else:
        yield SpeedPath("huge pages", "fast", "packed weights are on them")
