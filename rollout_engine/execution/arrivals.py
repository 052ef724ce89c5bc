"""Weights come to their place by the kernels' copy, where there is one."""

from rollout_engine.model.residence import streaming_copy
from sync.arrival import copy_by


def copy_by_kernel() -> None:
    """For all transports of this process. The kernels are loaded when first weights are copied."""
    copy_by(streaming_copy)
