"""Steps on one CUDA device, by the Triton kernels. Its modules import Triton: only where `why_not` finds nothing."""

from rollout_engine.kernels.triton.availability import why_not

__all__ = ["why_not"]
