"""A digest of the weights that features of pictures are computed from: equal for an engine and a trainer with the same.

Features that an engine hands to a trainer carry it, so that those of another version are refused.
"""

from collections.abc import Callable, Iterator

import xxhash
from torch import Tensor, nn

from rollout_engine.model.pictures.tower_forward import loose_parameters, picture_parts
from sync.digests import tensor_bytes

Values = Callable[[str], Tensor]
"""Returns the live values of a weight by its name."""


def tower_digest(owner: nn.Module, values: Values | None = None) -> str:
    """Digest names, dtypes, shapes and values of the vision tower and the projector: 32 hexadecimal digits.

    `owner`: a composite, or its parts without text. Matrices of LoRA layers are left out. `values`: gives, by its name
    in `owner`, the values of a weight that is on the meta device there. The weights are on the CPU.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(_weights_of(owner), key=lambda pair: pair[0]):
        if tensor.is_meta and values is not None:
            tensor = values(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor.detach().contiguous()))
    return digest.hexdigest()


def _weights_of(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights by the names that they have without LoRA layers around them."""
    yield from loose_parameters(owner).items()
    paths = {id(child): path for path, child in owner.named_modules()}
    for part in picture_parts(owner):
        for name, tensor in part.state_dict(prefix=f"{paths[id(part)]}.").items():
            pieces = name.split(".")
            if not any(piece.startswith("lora_") for piece in pieces):
                yield ".".join(piece for piece in pieces if piece != "base_layer"), tensor
