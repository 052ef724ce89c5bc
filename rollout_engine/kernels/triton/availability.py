"""Whether the Triton kernels can serve a device, and if not, why."""

import importlib.util

import torch

_OLDEST = (9, 0)
"""Compute capability: what comes before has not run these kernels."""


def why_not(device: torch.device) -> str | None:
    """What keeps the Triton kernels from serving `device`, as half a sentence for its user; None where they serve."""
    if device.type != "cuda":
        return f"the device is {device.type}, and the Triton kernels need CUDA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'rollout-engine[gpu]')"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"its compute capability is {capability[0]}.{capability[1]}, and the Triton kernels need 9.0"
    return None
