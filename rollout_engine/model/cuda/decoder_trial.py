"""Decides whether the fused decoder may run a module's layers: compares logits with those of modules."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.triton.paged_attention import Batch, Limits
from rollout_engine.model.cuda.attention import CudaBatch
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.row_invariance import ARITHMETIC
from rollout_engine.model.modules.geometry import LayerGeometry, keeps_states
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.modules.structure_checks import UnsupportedStructure
from rollout_engine.model.ranks.seat import ELSEWHERE, Seat

BLOCK_SIZE = 16
_SIZES = (17, 3), (1, 4)
"""Tokens of two sequences in each step: two prompts; then one decodes while the other continues its prompt."""
_LONGEST = 18
"""Tokens of the longer one."""
_END = 1 << 16
"""Trials stay below this position, so that their rotary tables are small: layers read no position but by these."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Allowed root mean square of the difference, relative to that of the logits."""


class Reason(NamedTuple):
    """Why the layers of a module must run as modules."""

    text: str
    is_failure: bool
    """The structure is supported, but the kernels fail here, or their results are wrong."""


def unsupported_reason(
    module: PreTrainedModel,
    geometry: Sequence[LayerGeometry],
    *,
    deterministic: bool,
    block_size: int = BLOCK_SIZE,
    seat: Seat | None = None,
) -> Reason | None:
    """Why the layers of `module` must run as modules; None if they need not. Weights must be loaded.

    Fused layers round differently, so logits may differ slightly; a different factor, norm or rotation moves them more.
    `deterministic`: every bit must be equal to a trainer's. `seat`: of a rank; all call this together, and get the
    same answer.
    """
    options: dict[str, Any] = {"deterministic": deterministic, "block_size": block_size}
    reason = _reason_of(lambda: _fused_model(module, geometry, **options))
    if seat is not None and not seat.all_agree(reason is None):  # ranks run together, or none does
        return reason or _ELSEWHERE
    reason = reason or _reason_of(lambda: _compare(module, geometry, **options))
    if seat is not None and not seat.all_agree(reason is None):
        return reason or _ELSEWHERE
    return reason


_ELSEWHERE = Reason(ELSEWHERE, is_failure=False)


def _reason_of(attempt: Callable[[], object]) -> Reason | None:
    """Why an attempt failed; None if it did not."""
    try:
        attempt()
    except _Disagreement as problem:
        return Reason(str(problem), is_failure=True)
    except UnsupportedStructure as problem:
        return Reason(str(problem), is_failure=False)
    except (torch.OutOfMemoryError, BrokenTurnsError):
        raise
    except Exception as problem:  # foreign modules may fail in any way
        text = f"the fused decoder fails on its parts ({type(problem).__name__}: {problem})"
        return Reason(text, is_failure=True)
    return None


class _Disagreement(Exception):
    """How results differ that should not."""


def _fused_model(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], *, deterministic: bool, block_size: int
) -> CudaModel:
    return small_model(module, geometry, block_size, fused=True, deterministic=deterministic)


def _compare(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], *, deterministic: bool, block_size: int
) -> None:
    """Raise `_Disagreement` if fused layers compute other results than modules, or than a trainer."""
    fused = _fused_model(module, geometry, deterministic=deterministic, block_size=block_size)
    modules = small_model(module, geometry, block_size, fused=False, deterministic=False)
    for shift in sorted({0, _far_shift(module)}):
        ours = served(fused, shift)
        if (problem := disagreement(ours, served(modules, shift))) is not None:
            raise _Disagreement(problem)
        if deterministic and not shift and not all(map(torch.equal, ours, _compute_trained(module))):
            raise _Disagreement("its logits are not bit for bit those that its modules give a trainer")


def trainer_difference(module: PreTrainedModel, geometry: Sequence[LayerGeometry], *, block_size: int) -> str | None:
    """How modules that `row_invariance` has replaced compute other bits for an engine than for a trainer; or None."""
    modules = small_model(module, geometry, block_size, fused=False, deterministic=True)
    if all(map(torch.equal, served(modules), _compute_trained(module))):
        return None
    return "its logits are not bit for bit those that the same modules give a trainer"


def _far_shift(module: PreTrainedModel) -> int:
    """A shift of the trial's positions to the model's last ones, or to those before `_END`; 0 if they are near."""
    return max(far_starts(module.config.get_text_config(), _LONGEST, end=_END), default=0)


def small_model(
    module: PreTrainedModel, geometry: Sequence[LayerGeometry], block_size: int = BLOCK_SIZE, **options: Any
) -> CudaModel:
    """A model of `module` with a pool just large enough for the trial's batches."""
    width = _blocks_each(block_size)
    context = max(width * block_size, _far_shift(module) + _LONGEST)
    limits = Limits(num_tokens=64, num_sequences=4, context=context)
    sizes: dict[str, Any] = {"num_blocks": 2 * width, "block_size": block_size}
    num_slots = 2 * keeps_states(geometry)
    return CudaModel(module, geometry, **sizes, num_state_slots=num_slots, limits=limits, **options)


def disagreement(ours: list[Tensor], theirs: list[Tensor]) -> str | None:
    """Describe how two results of the same computation differ; None if the difference is rounding."""
    difference = _difference(torch.cat(ours), torch.cat(theirs))
    if not difference <= _TOLERANCES[theirs[0].dtype]:
        return f"its logits differ from its modules' by {difference:.2g} of their size"
    return None


def _token_ids(module: PreTrainedModel) -> list[Tensor]:
    """Tokens of each sequence, int64."""
    weight, vocab_size = next(module.parameters()), module.config.get_text_config().vocab_size
    lengths = [sum(sizes) for sizes in zip(*_SIZES, strict=True)]
    tokens = (torch.arange(sum(lengths), device=weight.device) * 7919 + 13) % vocab_size
    return list(tokens.split(lengths))


@torch.inference_mode()
def served(model: CudaModel, shift: int = 0) -> list[Tensor]:
    """Logits of each of the trial's sequences, computed by steps of an engine; `shift` is added to all positions."""
    token_ids = _token_ids(model.module)
    logits: list[list[Tensor]] = [[], []]
    first = [0, 0]
    for sizes in _SIZES:
        batch = _batch(token_ids, first, sizes, model.kv.block_size)
        batch = batch._replace(positions=batch.positions + shift)
        if not model.kv.states.is_empty:
            batch = batch._replace(states=StateChunks.in_place(sizes, first, [0, 1]))
        rows = torch.arange(sum(sizes), device=model.device)
        for index, part in enumerate(model.forward(batch, rows).split(sizes)):
            logits[index].append(part)
            first[index] += len(part)
    return list(map(torch.cat, logits))


@torch.inference_mode()
def _compute_trained(module: PreTrainedModel) -> list[Tensor]:
    """Logits of each sequence, computed as a trainer does after `exact.enable`, over the same weights."""
    token_ids = _token_ids(module)
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, shared)
    twin.set_attn_implementation(ARITHMETIC.attention_name)
    ARITHMETIC.make_row_invariant(twin)
    logits = twin(input_ids=pad_sequence(token_ids, batch_first=True), use_cache=False).logits
    return [row[: len(ids)] for row, ids in zip(logits, token_ids, strict=True)]


def _batch(token_ids: list[Tensor], first: list[int], sizes: tuple[int, int], block_size: int) -> CudaBatch:
    """A batch of the next `sizes` tokens of each sequence, after its `first` tokens."""
    device = token_ids[0].device
    ends = [start + size for start, size in zip(first, sizes, strict=True)]
    spans = list(zip(first, ends, strict=True))
    width = _blocks_each(block_size)
    tables = torch.arange(2 * width, dtype=torch.int32, device=device).view(2, width)
    positions = torch.cat([torch.arange(start, end, device=device) for start, end in spans])
    rows = torch.arange(2, device=device).repeat_interleave(torch.tensor(sizes, device=device))
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    starts = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32, device=device)
    lens = torch.tensor(ends, dtype=torch.int32, device=device)
    ids = torch.cat([known[start:end] for known, (start, end) in zip(token_ids, spans, strict=True)])
    return CudaBatch(ids, positions, slots, Batch(starts, lens, tables, num_decodes=int(sizes[0] == 1)))


def _blocks_each(block_size: int) -> int:
    return -(-_LONGEST // block_size)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
