"""Encodes pictures with a vision tower, one at a time, and keeps the features of those that were used last."""

from collections import OrderedDict

import torch
from torch import nn

from rollout_engine.base.pictures import Picture
from rollout_engine.model.pictures.tower_forward import PictureFeatures, encode_picture


class PictureEncoder:
    """Features of pictures by their digests, under the weights that the tower has now.

    Args:
        tower: a composite's parts without text, behind `make_tower_exact`.
        dtype: that of the text model's embeddings.
        max_bytes: most bytes of features that are kept; those of the last picture always are.
    """

    def __init__(self, tower: nn.Module, dtype: torch.dtype, max_bytes: int) -> None:
        self.tower = tower
        self._dtype, self._max_bytes = dtype, max_bytes
        self._held: OrderedDict[bytes, PictureFeatures] = OrderedDict()
        self.num_encoded = 0
        """Pictures that were encoded."""
        self.num_bytes = 0
        """Bytes of features that are kept."""

    @torch.inference_mode()
    def features(self, picture: Picture) -> PictureFeatures:
        """The features of a picture, in the text model's dtype. Raises as `encode_picture`."""
        found = self._held.get(picture.digest)
        if found is not None:
            self._held.move_to_end(picture.digest)
            return found
        arrays = {name: torch.from_numpy(array.copy()) for name, array in picture.arrays.items()}  # aligned, writable
        rows, deepstack = encode_picture(self.tower, arrays)
        found = PictureFeatures(rows.to(self._dtype), [each.to(self._dtype) for each in deepstack])
        self.num_encoded += 1
        self._held[picture.digest] = found
        self.num_bytes += _num_bytes(found)
        while self.num_bytes > self._max_bytes and len(self._held) > 1:
            self.num_bytes -= _num_bytes(self._held.popitem(last=False)[1])
        return found

    def reset(self) -> None:
        """Forget all features: call it whenever weights have changed."""
        self._held.clear()
        self.num_bytes = 0


def _num_bytes(features: PictureFeatures) -> int:
    return sum(tensor.nbytes for tensor in (features.rows, *features.deepstack))
