"""Whether the Triton kernels support a device, and if not, why."""

import importlib.util

import torch

_OLDEST = (9, 0)
"""Oldest compute capability on which these kernels were run."""


def unsupported_reason(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`, as a clause for an error text; None where they can."""
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
