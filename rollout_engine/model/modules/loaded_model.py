"""The result of loading a model, which a backend puts to work."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout_engine.base.pictures import PictureInfo
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.heads import HeadKind


class ModelFiles(NamedTuple):
    """The directory of a model."""

    directory: Path
    config_digest: str
    """xxh3-128 of config.json as the module was made from it."""


class LoadedModel(NamedTuple):
    """A causal LM or a classifier on one device, in eval mode, and the engine's data about it."""

    module: PreTrainedModel
    """Attention goes to `ATTENTION_NAME`; q/k/v and gate/up parameters are slices of one buffer each."""
    dtype: torch.dtype
    stored_dtype: torch.dtype | None
    """The dtype of the checkpoint's weights, if it is known."""
    geometry: list[LayerGeometry]
    """The geometry of each attention layer, in order."""
    eos_token_ids: list[int]
    """Ids that end a sequence, by the checkpoint's generation_config.json, else by its config.json; may be empty."""
    max_model_len: int
    """Most positions the checkpoint serves exactly."""
    vocab_size: int
    """Width of the logits; token ids are below it."""
    targets: dict[str, Tensor]
    """Live storage by name, the module's names and the checkpoint's: a weight update writes there."""
    aliases: list[list[str]]
    """Names of `targets` that denote the same storage: tied weights, or both namings of one weight."""
    names: Any
    """The further names that checkpoints and updates may have, a `sync.checkpoint_names.CheckpointNames`."""
    files: ModelFiles
    head_kind: HeadKind | None = None
    """The head that classifies in place of the output head; None in a causal LM."""
    cut: Any = None
    """The rank's part of it, a `ranks.cut.ModelCut`; None if one process has it all."""

    tower: PreTrainedModel | None = None
    """A composite's parts other than its text model, which encode pictures; None if pictures are not served."""
    picture_info: PictureInfo | None = None
    """How it takes pictures, or why not; None if it is no model of pictures."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that each layer is cut over."""
        return 1 if self.cut is None else int(self.cut.seat.num_ranks)

    @property
    def of_all_stages(self) -> "LoadedModel":
        """The same with the geometry of all layers, those of other stages too."""
        stage = None if self.cut is None else self.cut.stage
        return self if stage is None else self._replace(geometry=stage.geometry)
