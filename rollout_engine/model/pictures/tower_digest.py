"""A digest of the weights that features of pictures are computed from: equal for an engine and a trainer with the same.

Features that an engine hands to a trainer carry it, so that those of another version are refused.
"""

from collections.abc import Iterator

import xxhash
from torch import Tensor, nn

from rollout_engine.model.pictures.tower_forward import picture_parts
from sync.digests import tensor_bytes


def tower_digest(owner: nn.Module) -> str:
    """Digest names, dtypes, shapes and values of the vision tower and the projector: 32 hexadecimal digits.

    `owner`: a composite, or its parts without text. Matrices of LoRA layers are left out. The weights are on the CPU.
    """
    digest = xxhash.xxh3_128()
    for number, part in enumerate(picture_parts(owner)):
        for name, tensor in sorted(_weights_of(part)):
            digest.update(f"{number} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor_bytes(tensor.detach().contiguous()))
    return digest.hexdigest()


def _weights_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights by the names that they have without LoRA layers around them."""
    for name, tensor in part.state_dict().items():
        pieces = name.split(".")
        if not any(piece.startswith("lora_") for piece in pieces):
            yield ".".join(piece for piece in pieces if piece != "base_layer"), tensor
