"""A table from the names of weights, the module's and the checkpoint's, to views of their live storage.

The two namings differ for some architectures (experts stacked in the module, separate in the file). Hugging Face can
write a module under checkpoint names; run on index tensors instead of weights, that shows which strided view of which
parameter each checkpoint name denotes. Loading and weight updates both write through these views.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter, revert_weight_conversion

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.checkpoint import as_config_errors
from rollout_engine.model.ranks.part import Part, Region
from rollout_engine.model.ranks.share import Share
from sync.checkpoint_names import CheckpointNames
from sync.digests import tensor_bytes
from sync.manifest import counted
from sync.quantised.reader import CheckpointTensor
from sync.stored_tensor import StoredTensor

_BAND_BYTES = 8 << 20
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class WeightTable(NamedTuple):
    """Views and their owners by name; both dicts have the same keys."""

    views: dict[str, Tensor]
    owners: dict[str, str]
    """The module's name of the parameter or buffer that a view is (part of); tied parameters have one owner."""
    transposable: Mapping[str, tuple[int, int]] = {}
    """By name, two dimensions of a view that a checkpoint may have the other way round: its shape decides."""

    @classmethod
    def of(cls, module: PreTrainedModel, divided: Collection[str] = ()) -> "WeightTable":
        """The table of every persistent tensor of `module`, whose parameters must not move any more.

        `divided`: names of tensors of checkpoints that are several weights, and are divided before they are loaded
        (`tower_files`). Raises `ConfigError` when a checkpoint name does not denote a strided view of a parameter.
        """
        stored = module.state_dict(keep_vars=True)
        first_names: dict[int, str] = {}
        views = {name: tensor.detach() for name, tensor in stored.items()}
        owners = {name: first_names.setdefault(id(tensor), name) for name, tensor in stored.items()}
        for name, checkpoint_name, view in list(_checkpoint_views(module, views, divided)):
            views[checkpoint_name] = view
            owners[checkpoint_name] = owners[name]
        return cls(views, owners, dict(_transposable(module, stored)))

    def with_part(self, prefix: str, other: "WeightTable") -> "WeightTable":
        """A table that also has the names of `other`, each behind `prefix`."""
        return WeightTable(
            self.views | {prefix + name: view for name, view in other.views.items()},
            self.owners | {prefix + name: prefix + owner for name, owner in other.owners.items()},
            {**self.transposable, **{prefix + name: dims for name, dims in other.transposable.items()}},
        )

    def aliases(self) -> list[list[str]]:
        """Groups of two or more names that denote the same view: tied weights, or both namings of one weight."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, view in self.views.items():
            groups.setdefault(_place(view), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def load(
        self,
        entries: list[CheckpointTensor],
        names: CheckpointNames = CheckpointNames(),  # noqa: B008 (it is frozen)
        *,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        """Fill every view from a checkpoint, converting between floating dtypes (to nearest, ties to even).

        `names`: names that it may have instead of the table's, or in addition. `parts`: fill these instead; they hold
        a part of every view. Raises `ConfigError` before anything is written when a name is missing or unexpected,
        or a shape or dtype differs.
        """
        with as_config_errors():
            wanted = names.used(((entry.name, entry) for entry in entries), self.views)
        views = self.views if parts else self.views | dict(self._transpose_views(wanted))
        self._check(wanted, views)
        self._check_complete({name for name, _ in wanted})
        written: dict[tuple[object, ...], str] = {}
        with as_config_errors():
            for name, entry in wanted:
                view = views[name]
                before = written.setdefault(_place(view), name)
                part = Part(view, Region(0, view.numel())) if parts is None else parts[name]
                if before == name:
                    _fill(part, entry)
                elif part.view.numel() and not torch.equal(part.view.cpu(), _part_of(part, entry)):
                    raise ConfigError(
                        f"{entry.path}: '{entry.name}' and '{before}' differ, but the configuration ties them. If they "
                        "are meant to differ, set tie_word_embeddings to false in config.json."
                    )
            for check in {entry.check for _, entry in wanted}:
                check()

    def _transpose_views(self, entries: list[tuple[str, CheckpointTensor]]) -> Iterable[tuple[str, Tensor]]:
        """The views that a checkpoint has transposed, as it has them."""
        for name, entry in entries:
            if name in self.transposable and entry.shape != tuple(self.views[name].shape):
                yield name, self.views[name].transpose(*self.transposable[name])

    def _check(self, entries: list[tuple[str, CheckpointTensor]], views: Mapping[str, Tensor]) -> None:
        _refuse("not in the model", [f"{e.name} ({e.path.name})" for name, e in entries if name not in self.views])
        known = [(e, views[name]) for name, e in entries]
        _refuse(
            "of another shape",
            [
                f"{e.name}: expected {list(view.shape)}, {e.path.name} has {list(e.shape)}"
                for e, view in known
                if tuple(view.shape) != e.shape
            ],
        )
        _refuse(
            "of a dtype that is not converted",
            [
                f"{e.name}: expected {view.dtype}, {e.path.name} has {e.stored_dtype}"
                for e, view in known
                if not _convertible(e, view)
            ],
        )

    def _check_complete(self, names: set[str]) -> None:
        given: dict[str, int] = {}
        places = {_place(self.views[name]): name for name in names}
        for name in places.values():
            given[self.owners[name]] = given.get(self.owners[name], 0) + self.views[name].numel()
        incomplete = {owner for owner in self.owners.values() if given.get(owner, 0) < self.views[owner].numel()}
        _refuse("missing", [name for name in self.views if self.owners[name] in incomplete and name not in names])


def _transposable(module: PreTrainedModel, names: Iterable[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    """(name, dimensions) of tensors that transformers transposes as it loads them, if their shape is not the module's.

    The hub's Qwen3-VL mixtures store their experts so.
    """
    conversions = getattr(module, "_weight_conversions", None) or []
    for conversion in (each for each in conversions if isinstance(each, WeightConverter)):
        for step in (each for each in conversion.operations if isinstance(each, Transpose) and each.check_dims):
            for name in names:
                if any(re.search(pattern, name) for pattern in conversion.target_patterns):
                    yield name, (step.dim0, step.dim1)


def _checkpoint_views(
    module: PreTrainedModel, views: dict[str, Tensor], divided: Collection[str]
) -> Iterable[tuple[str, str, Tensor]]:
    """(module's name, checkpoint's name, view) wherever the two names differ."""
    shapes = {name: torch.empty(view.shape, device="meta") for name, view in views.items()}
    if revert_weight_conversion(module, dict(shapes)).keys() == shapes.keys():
        return
    for name, view in views.items():
        flat = torch.arange(view.numel()).view(view.shape)
        for checkpoint_name, indices in revert_weight_conversion(module, {name: flat}).items():
            if checkpoint_name != name and checkpoint_name not in divided:
                yield name, checkpoint_name, _strided_view(view, flat, indices, checkpoint_name)


def _strided_view(whole: Tensor, flat: Tensor, indices: Tensor, name: str) -> Tensor:
    """The view of contiguous `whole` whose elements have the positions `indices`; `flat`: those of all elements."""
    strides = [
        int((indices.select(d, 1) - indices.select(d, 0)).flatten()[0]) if indices.shape[d] > 1 else 0
        for d in range(indices.ndim)
    ]
    offset = int(indices.flatten()[0])
    if not torch.equal(torch.as_strided(flat, indices.shape, strides, offset), indices):
        raise ConfigError(f"The checkpoint's '{name}' is stored in an order that cannot be written in place here.")
    return torch.as_strided(whole, indices.shape, strides, whole.storage_offset() + offset)


def _place(view: Tensor) -> tuple[object, ...]:
    return view.data_ptr(), view.shape, view.stride()


def _convertible(entry: CheckpointTensor, view: Tensor) -> bool:
    return entry.dtype in _FLOATS if view.dtype.is_floating_point else entry.dtype == view.dtype


def _fill(part: Part, entry: CheckpointTensor) -> None:
    """Read a part of a tensor of a checkpoint, without a copy if both have the same layout."""
    view, region = part
    if not view.numel():
        return
    is_plain = view.device.type == "cpu" and view.is_contiguous() and view.dtype == entry.dtype
    if isinstance(entry, StoredTensor) and is_plain and region.columns is None:
        entry.fetch(tensor_bytes(view), region.first * entry.dtype.itemsize)
    else:
        view.copy_(_part_of(part, entry))


def _part_of(part: Part, entry: CheckpointTensor) -> Tensor:
    """A part of a tensor of a checkpoint, in the model's dtype."""
    view, region = part
    if tuple(view.shape) == entry.shape:
        return entry.materialize().to(view.dtype)
    if not isinstance(entry, StoredTensor):  # computed as a whole
        return region.of(entry.materialize().flatten(), 0).reshape(view.shape).to(view.dtype)
    values = torch.empty(view.shape, dtype=entry.dtype)
    if region.columns is None:
        entry.fetch(tensor_bytes(values), region.first * entry.dtype.itemsize)
    else:
        _fetch_columns(values, region.columns, entry)
    return values.to(view.dtype)


def _fetch_columns(out: Tensor, columns: Share, entry: StoredTensor) -> None:
    """Read columns of a matrix, some rows at a time."""
    row = columns.whole * entry.dtype.itemsize
    for rows in out.split(max(1, _BAND_BYTES // row)):
        band = torch.empty(len(rows), columns.whole, dtype=entry.dtype)
        entry.fetch(tensor_bytes(band), rows.storage_offset() // columns.size * row)
        rows.copy_(band[:, columns.rows])


def _refuse(what: str, offenders: list[str]) -> None:
    if offenders:
        more = f" ... and {len(offenders) - 10} more" if len(offenders) > 10 else ""
        raise ConfigError(
            f"The checkpoint does not fit the model: {counted(offenders, 'tensor', 'tensors')} {what}: "
            f"{'; '.join(offenders[:10])}{more}."
        )
