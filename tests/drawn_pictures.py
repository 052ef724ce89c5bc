"""Prompts with random pictures in random places, for tests that give a model's arrays themselves."""

import inspect
from typing import NamedTuple

import torch
from tensordict import NonTensorStack, TensorDict

from rollout_engine import exact
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.testing.tiny_pictures import random_picture
from rollout_engine.text.picture_processor import read_image_processor


class Drawn(NamedTuple):
    """Token ids, and the pictures at their spans among them."""

    ids: list
    placed: tuple


class PictureSource:
    """Draws pictures as a checkpoint's image processor makes them, and prompts with their placeholders.

    `directory`: of the checkpoint; None: it draws no pictures.
    """

    def __init__(self, directory, composite):
        self._processor = directory and read_image_processor(directory)
        self.composite = composite
        self._names = inspect.signature(composite.get_image_features).parameters
        self.token = composite.config.image_token_id
        self._sizes = {}

    def picture(self, seed, width, height):
        found = self._processor(random_picture(seed, width, height), return_tensors="np")
        return Picture.of({name: array for name, array in found.items() if name in self._names})

    def draw_picture(self, rng):
        return self.picture(rng.randrange(1000), rng.randrange(9, 60), rng.randrange(9, 60))

    def other(self, picture, rng):
        """Another picture with arrays of the same shapes."""
        pixels = torch.randn(
            picture.arrays["pixel_values"].shape, generator=torch.Generator().manual_seed(rng.randrange(99))
        )
        return Picture.of(picture.arrays | {"pixel_values": pixels.numpy()})

    @torch.no_grad()
    def num_features(self, picture):
        if picture.digest not in self._sizes:
            arrays = {name: torch.from_numpy(array.copy()) for name, array in picture.arrays.items()}
            found = self.composite.get_image_features(**arrays, return_dict=True).pooler_output
            parts = [found] if isinstance(found, torch.Tensor) else found
            self._sizes[picture.digest] = sum(part.numel() // part.shape[-1] for part in parts)
        return self._sizes[picture.digest]

    def prompt(self, rng, pictures, *, most=9):
        """Random text of up to `most` tokens before, between and behind pictures."""
        ids, placed = draw_text(rng, most), []
        for each in pictures:
            size = self.num_features(each)
            placed.append(PlacedPicture(len(ids), len(ids) + size, each))
            ids += [self.token] * size + draw_text(rng, most)
        return Drawn(ids, tuple(placed))


def draw_text(rng, most):
    """Random ids of bytes."""
    return [rng.randrange(3, 259) for _ in range(rng.randrange(1, most + 1))]


def batch_of(rows, *, is_left=False):
    """A rollout of these rows, as far as trainers read it."""
    length = max(len(ids) for ids, _ in rows)
    pads = [[0] * (length - len(ids)) for ids, _ in rows]
    ids = torch.tensor([pad + ids if is_left else ids + pad for (ids, _), pad in zip(rows, pads, strict=True)])
    mask = torch.tensor([[1] * len(ids) + [0] * len(pad) for (ids, _), pad in zip(rows, pads, strict=True)]).bool()
    return made_batch(ids, rows, {("masks", "all_attention_mask"): mask.flip(1) if is_left else mask})


def packed_batch_of(rows):
    ends = torch.tensor([0, *(len(ids) for ids, _ in rows)]).cumsum(0)
    return made_batch(torch.tensor([[token for ids, _ in rows for token in ids]]), rows, {"cu_seqlens": ends})


def made_batch(ids, rows, others):
    batch = TensorDict({("tokens", "full"): ids}, batch_size=[])
    batch["pictures"] = NonTensorStack(*(placed for _, placed in rows))
    for key, value in others.items():
        batch[key] = value
    return batch


def plain_logits(model, batch):
    """Logits [B, T, V] of a padded batch by transformers' own forward."""
    given, names = exact.inputs(batch), inspect.signature(model.forward).parameters
    types = given.pop("mm_token_type_ids", None)
    given |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in names and types is not None}
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)  # most towers do so themselves
    mask = batch["masks", "all_attention_mask"].long()
    return model(input_ids=batch["tokens", "full"], attention_mask=mask, use_cache=False, **given).logits
