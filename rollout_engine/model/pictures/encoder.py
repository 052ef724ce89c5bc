"""Encodes pictures with a vision tower, one at a time, and keeps the features of those that were used last."""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from rollout_engine.base.pictures import EncodedPictures, Picture
from rollout_engine.model.pictures.feature_arrays import to_arrays
from rollout_engine.model.pictures.tower_digest import Values, tower_digest
from rollout_engine.model.pictures.tower_forward import PictureFeatures, encode_picture


class TowerAdapters(Protocol):
    """LoRA adapters, some of which change a tower: `model.cpu.adapters.CpuAdapterPool`."""

    def tower_version(self, slot: int) -> int:
        """A number for the values that the adapter in a slot has, never used again; 0: it does not change the tower."""
        ...

    def encoding(self, slot: int) -> AbstractContextManager[None]:
        """Inside, all rows of products are under the adapter in a slot; -1: under none."""
        ...


class PictureEncoder:
    """Features of pictures by their digests, under the weights that the tower has now.

    Args:
        tower: a composite's parts without text, behind `make_tower_exact`.
        dtype: that of the text model's embeddings.
        max_bytes: most bytes of features that are kept; those of the last picture always are.
    """

    def __init__(self, tower: nn.Module, dtype: torch.dtype, max_bytes: int) -> None:
        self.tower = tower
        self.adapters: TowerAdapters | None = None
        """Those that a picture may be encoded under; None: there are none."""
        self._dtype, self._max_bytes = dtype, max_bytes
        self._held: OrderedDict[tuple[bytes, int], PictureFeatures] = OrderedDict()
        """By the digest of a picture, and the version of the adapter that changed the tower for it."""
        self._tower_digest: str | None = None
        """That of the weights now; None: it was not computed since they changed."""
        self.num_encoded = 0
        """Pictures that were encoded."""
        self.num_bytes = 0
        """Bytes of features that are kept."""

    @torch.inference_mode()
    def features(self, picture: Picture, adapter_slot: int = -1) -> PictureFeatures:
        """The features of a picture, in the text model's dtype. Raises as `encode_picture`.

        `adapter_slot`: of the sequence that has it; -1: none.
        """
        version = 0 if self.adapters is None or adapter_slot < 0 else self.adapters.tower_version(adapter_slot)
        key = picture.digest, version
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
            return found
        found = self._held[key] = self._encode(picture, adapter_slot if version else -1)
        self.num_encoded += 1
        self.num_bytes += _num_bytes(found)
        while self.num_bytes > self._max_bytes and len(self._held) > 1:
            self.num_bytes -= _num_bytes(self._held.popitem(last=False)[1])
        return found

    def encode_arrays(self, pictures: Sequence[Picture], values: Values | None = None) -> EncodedPictures:
        """Encode pictures under no adapter, and give their features as arrays.

        One without arrays stands for its digest alone: its features are given if they are kept. `values`: as for
        `tower_digest`. Raises as `encode_picture`.
        """
        if self._tower_digest is None:
            self._tower_digest = tower_digest(self.tower, values)
        found = [self.features(each) if each.arrays else self._held.get((each.digest, 0)) for each in pictures]
        rows, deepstack = zip(*map(to_arrays, found), strict=True) if found else ((), ())
        return EncodedPictures(self._tower_digest, str(self._dtype).removeprefix("torch."), [*rows], [*deepstack])

    def reset(self) -> None:
        """Forget all features: call it whenever weights have changed."""
        self._held.clear()
        self.num_bytes, self._tower_digest = 0, None

    def _encode(self, picture: Picture, adapter_slot: int) -> PictureFeatures:
        arrays = {name: torch.from_numpy(array.copy()) for name, array in picture.arrays.items()}  # aligned, writable
        if self.adapters is None:
            rows, deepstack = encode_picture(self.tower, arrays)
        else:
            with self.adapters.encoding(adapter_slot):
                rows, deepstack = encode_picture(self.tower, arrays)
        return PictureFeatures(rows.to(self._dtype), [each.to(self._dtype) for each in deepstack])


def _num_bytes(features: PictureFeatures) -> int:
    return sum(tensor.nbytes for tensor in (features.rows, *features.deepstack))
