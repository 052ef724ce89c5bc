"""Stand-ins for the parts of a module that other stages of a pipe have: layers, the embedding and the head.

    stage 0   embedding, layers 0 to 3, layers that pass on                     no head
    stage 1   zeros, layers that pass on, the last of which is the entrance, layers 4 to 7, norm, head

The forward of the whole module runs as it was written: masks, rotations and arguments of layers are its own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class PassedLayer(nn.Module):
    """A decoder layer of another stage: its output is its input."""

    def __init__(self, layer: nn.Module, *, attends: bool, num_outputs: int = 0) -> None:
        """`layer`: the one that it replaces, whose plain attributes it has: the module's forward may read some.

        `num_outputs`: length of the tuple that the layer returns; 0: it returns hidden states alone.
        """
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.attends = attends
        """Whether the layer has attention."""
        self._num_others = num_outputs - 1

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor | None, ...]:
        passed = self._pass_on(hidden_states)
        return passed if self._num_others < 0 else (passed, *[None] * self._num_others)

    def _pass_on(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class EntranceLayer(PassedLayer):
    """The layer before the first one of a stage: its output [..., T, H] is that of the stage before."""

    def __init__(
        self,
        layer: nn.Module,
        enter: Callable[[Sequence[int], torch.dtype], Tensor],
        *,
        attends: bool,
        num_outputs: int = 0,
    ) -> None:
        """`enter` gives a tensor of this shape and dtype."""
        super().__init__(layer, attends=attends, num_outputs=num_outputs)
        self._enter = enter

    def _pass_on(self, hidden_states: Tensor) -> Tensor:
        return self._enter(hidden_states.shape, hidden_states.dtype)


class AbsentEmbedding(nn.Module):
    """An embedding of another stage: zeros [..., H]."""

    weight: Tensor
    """[0, H]."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, Tensor), "it is a table"
        self.register_buffer("weight", weight.new_empty(0, weight.shape[1]), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.new_zeros(*input.shape, self.weight.shape[1])


class AbsentHead(nn.Module):
    """An output head of another stage: logits [..., 0] of states [..., H]."""

    weight: Tensor
    """[0, H]."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        weight = head.weight
        assert isinstance(weight, Tensor), "it is a linear"
        self.register_buffer("weight", weight.new_empty(0, weight.shape[1]), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return input[..., :0]
