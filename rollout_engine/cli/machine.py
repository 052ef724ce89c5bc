"""Describes the machine: for `doctor`, and for the record next to every measured figure."""

import importlib.metadata
import os
import platform
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
"""Instruction sets that matter for matrix products, strongest first, by torch's names."""


def describe() -> dict[str, Any]:
    """Returns CPU model, instruction sets, cores, threads, memory and operating system."""
    return {
        "cpu": cpu_name(),
        "isa": instruction_sets(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cpus": usable_cpus(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    """The CPU's name as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def instruction_sets() -> list[str]:
    """The instruction sets of this CPU that matter for matrix products, strongest first."""
    have = torch.cpu.get_capabilities()
    return [name for name in _ISA if have.get(name)]


def usable_cpus() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Distribution -> installed version, or None; and Python's own."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
