"""Whether the Triton kernels support a device, and if not, why."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

_OLDEST = (9, 0)
"""Oldest compute capability on which these kernels were run."""


def unsupported_reason(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`, as a clause for an error text; None if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}, and the Triton kernels need CUDA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'rollout-engine[gpu]')"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"its compute capability is {capability[0]}.{capability[1]}, and the Triton kernels need 9.0"
    return _compiler_missing()


def _compiler_missing() -> str | None:
    """A tool that Triton lacks to compile the C code by which it launches a kernel; it would fail at the first launch.

    A complete cache of Triton's would do without, but no setting that is not in it.
    """
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None and knobs.build.impl is not None:
        return None  # the program compiles in a way of its own
    named = os.environ.get("CC")
    compiler = (shutil.which("gcc") or shutil.which("clang")) if named is None else shutil.which(named)
    if compiler is None:
        what = "Triton finds no C compiler" if named is None else f"Triton finds no C compiler CC={named!r}"
        return f"{what} (Debian and Ubuntu: apt install gcc)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if not header.exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"Triton needs the headers of Python, and {header} is missing (Debian and Ubuntu: apt install {package})"
    return None
