"""Features of pictures as arrays that cross from an engine to a trainer, with all their bits."""

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.pictures import EncodedPicture
from rollout_engine.model.pictures.tower_forward import PictureFeatures

_NO_ROWS = np.empty((0, 0), np.float32)


def to_arrays(features: PictureFeatures | None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows and deepstack as `base.pictures.EncodedPictures` has them; None: the features are not held."""
    if features is None:
        return _NO_ROWS, []
    return _to_array(features.rows), [_to_array(each) for each in features.deepstack]


def from_arrays(encoded: EncodedPicture, device: torch.device) -> PictureFeatures:
    """The features on a device, as a copy."""
    dtype: torch.dtype = getattr(torch, encoded.dtype)
    rows, *deepstack = (_from_array(each, dtype).to(device) for each in (encoded.rows, *encoded.deepstack))
    return PictureFeatures(rows, deepstack)


def _to_array(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found


def _from_array(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(array)).view(dtype)
