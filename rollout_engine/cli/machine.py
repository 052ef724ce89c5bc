"""The machine in a few facts: for `doctor`, and beside every figure that was measured."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

_ISA = (
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512_f",
    "avx2",
    "bf16",
    "sve",
    "neon",
)
"""What matters for matrix products, strongest first, by torch's names."""


def describe() -> dict[str, Any]:
    """CPU model, instruction sets, cores, threads, memory, operating system."""
    return {
        "cpu": cpu_name(),
        "isa": instruction_sets(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cpus": usable_cpus(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_class() -> str:
    """Machines of one class are expected to reach the same figures: ``intel-xeon-processor-amx_bf16-2``."""
    name = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", "", cpu_name(), flags=re.IGNORECASE)
    isa = next(iter(instruction_sets()), platform.machine())
    return "-".join([*re.findall(r"[a-z0-9.]+", name.lower()), isa, str(usable_cpus())])


def cpu_name() -> str:
    """As the operating system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def instruction_sets() -> list[str]:
    """Those that matter for matrix products, strongest first."""
    have = torch.cpu.get_capabilities()
    return [name for name in _ISA if have.get(name)]


def usable_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Distribution -> installed version, None where it is not."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
