"""Weights come to their place by the kernels' copy, where there is one."""

import torch

from rollout_engine.model.residence import streaming_copy
from sync.arrival import Crossing, copy_by, cross_by


def copy_by_kernel() -> None:
    """For all transports of this process. The kernels are loaded when first weights are copied."""
    copy_by(streaming_copy)


def cross_to(device: torch.device, crossing: Crossing | None) -> None:
    """For all transports of this process, to and from places on `device`. None: what there is stays."""
    if crossing is not None:
        cross_by(lambda place: crossing if place.device == device else None)
