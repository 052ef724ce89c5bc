"""Facts about a machine that the bits of results depend on."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch
import transformers

from rollout_engine.base.version import VERSION

_COMPUTING = ("avx", "amx", "fma", "f16c", "bf16", "i8mm", "neon", "sve", "sme")
"""Beginnings of torch's names for the instruction sets by which products are computed."""


def made_with(device: torch.device) -> dict[str, str]:
    """Versions of libraries, the machine's kind, and the device that computes, as logs of rollouts keep them."""
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    is_cpu = device.type == "cpu"
    runs_on = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device)
    return {**versions, "machine": platform.machine(), "device": f"{device.type}, {runs_on}"}


def arithmetic_of(device: torch.device) -> dict[str, str]:
    """Facts that must be the same on every rank: each computes a part of one machine's work."""
    facts = {"rollout_engine": VERSION} | made_with(device)
    if device.type == "cpu":
        sets = ((name, has) for name, has in torch.cpu.get_capabilities().items() if name.startswith(_COMPUTING))
        facts |= {f"instruction set {name}": "yes" if has else "no" for name, has in sets}
    else:
        facts["triton"] = _find_version("triton")
    return facts


def _find_version(package: str) -> str:
    """The version of an installed package; "none" without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def device_id(device: torch.device) -> str:
    """The id of a GPU among all machines; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def difference(facts: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """The first fact that `others` do not share, as "torch 2.13.0 here, torch 2.12.0 there"; None if all agree."""
    for name in {**facts, **others}:
        if facts.get(name) != others.get(name):
            return f"{name} {facts.get(name)} here, {name} {others.get(name)} there"
    return None
