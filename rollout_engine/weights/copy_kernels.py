"""How weights are written by the copy kernels, in place of numpy's and torch's plain copies."""

import torch

from rollout_engine.kernels.cpu.stream import streaming_copy
from sync.tensor_writer import TensorWriter, Upload


def kernel_writer(device: torch.device | None = None, upload: Upload | None = None) -> TensorWriter:
    """Copies on the host by the streaming kernel, which is loaded with the first tensor; to `device` by `upload`."""
    return TensorWriter(find_copy=streaming_copy, find_upload=lambda out: upload if out.device == device else None)
