"""Draws on the device: tokens, tempered log-probs of them and of the most likely, truncation.

What asks for more is drawn on the host (`runner`). Against a host's draw, log-probs differ by 2^-20 at most.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.cpu.sampling import Figures, Kept, Truncation
from rollout_engine.kernels.token_logprobs import row_temperatures
from rollout_engine.kernels.triton.sampling import Choice, SamplingRows, SamplingWorkspace, empty_figures, sample, score
from rollout_engine.kernels.triton.top_tokens import top_tokens
from rollout_engine.kernels.triton.truncation import truncate
from rollout_engine.messages import ModelRunnerOutput
from rollout_engine.model.sampler import BAD_LOGITS, SamplingBatch
from rollout_engine.sampling_params import SamplingParams


class DeviceColumns(NamedTuple):
    """`SamplingBatch` on the device, without what moves at every step."""

    temperatures: Tensor
    """float32 [N]."""
    seeds: Tensor
    """int64 [N]."""
    choices: Tensor
    """int32 [N] of `Choice`."""
    rules: Truncation | None
    truncates: Tensor
    """bool [N]: rows that `rules` may cut."""
    num_top: np.ndarray
    """int64 [N], on the host: see `SamplingBatch`."""
    wants_logprobs: bool

    @staticmethod
    def serve(batch: SamplingBatch) -> bool:
        """Whether all that `batch` asks is drawn here: all log-probs are tempered."""
        return batch._replace(num_top=np.zeros_like(batch.num_top)).is_plain

    @classmethod
    def of(cls, batch: SamplingBatch, device: torch.device) -> "DeviceColumns":
        """Of a batch that these `serve`."""
        given = torch.from_numpy(batch.temperature)
        choices = np.where(batch.temperature == 0, Choice.GREEDY, Choice.DRAWN).astype(np.int32)
        rules = batch.rules()
        return cls(
            row_temperatures(given, given[:, None]).to(device),
            torch.from_numpy(batch.seeds).to(device),
            torch.from_numpy(choices).to(device),
            None if rules is None else Truncation(*(column.to(device) for column in rules)),
            torch.from_numpy(batch.truncates).to(device),
            batch.num_top,
            batch.wants_logprobs,
        )


class DeviceSampler:
    """Memory of draws, as large as they have come."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._workspace: SamplingWorkspace | None = None
        self._figures: Figures | None = None

    def draw(self, logits: Tensor, columns: DeviceColumns, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of `logits` [N, V]: tokens int64 [N], and what `told` reads on the host, float64 [4 + 2 x most likely, N].

        `positions` int64 [N]: of the tokens to draw in their sequences.
        """
        workspace, figures = self._memory(len(logits))
        rows = SamplingRows(columns.temperatures, columns.seeds, positions, columns.choices)
        sample(logits, rows, workspace, figures)
        width = min(int(columns.num_top.max(initial=0)), logits.shape[1])
        top_ids = torch.empty(len(logits), width, dtype=torch.int32, device=logits.device)
        top_logprobs = torch.empty(len(logits), width, device=logits.device)
        if width:
            top_tokens(logits, columns.temperatures, workspace, figures, top_ids, top_logprobs)
        mass = torch.zeros_like(figures.log_total)
        if columns.rules is not None:
            kept = Kept(
                torch.empty_like(figures.log_total),
                torch.empty_like(figures.maximum),
                torch.empty_like(figures.tokens),
            )
            truncate(logits, rows, columns.rules, workspace, figures, kept)
            mass = torch.where(columns.truncates, (kept.log_total - figures.log_total).clamp(max=0), mass)
        usable = figures.maximum.isfinite()
        told = [figures.tokens.double(), figures.logprobs.double(), usable.double(), mass]
        told += [*top_ids.double().unbind(1), *top_logprobs.double().unbind(1)]
        return figures.tokens.clone(), torch.stack(told)

    def _memory(self, count: int) -> tuple[SamplingWorkspace, Figures]:
        if self._workspace is None or self._figures is None or len(self._figures.tokens) < count:
            size = 1 << (count - 1).bit_length()
            self._workspace = SamplingWorkspace.empty(size, self._vocab_size, self._device)
            self._figures = empty_figures(size, self._device)
        workspace = SamplingWorkspace(*(part[:count] for part in self._workspace))
        return workspace, Figures(*(part[:count] for part in self._figures))


def told(columns: DeviceColumns, drawn: Tensor) -> ModelRunnerOutput:
    """What `DeviceSampler.draw` found, on the host."""
    tokens, logprobs, usable, mass = drawn[:4].tolist()
    out = ModelRunnerOutput(
        token_ids=[int(token) for token in tokens],
        logprobs=logprobs if columns.wants_logprobs else None,
        kept_logprob_mass=None if columns.rules is None else torch.tensor(mass).tolist(),
        top_logprobs=_top(columns.num_top, drawn) if columns.num_top.any() else None,
    )
    if not all(usable):
        out.errors = {row: BAD_LOGITS for row, is_usable in enumerate(usable) if not is_usable}
        for row in out.errors:
            out.token_ids[row] = -1
    return out


def tell_tempered(out: ModelRunnerOutput, logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Of tokens drawn on the host from `logits` [N, V]: tempered log-probs by the kernel that a trainer has too."""
    if out.logprobs is None:
        return
    given = torch.tensor([each.temperature for each in params], dtype=torch.float64, device=logits.device)
    tokens = torch.tensor(out.token_ids, device=logits.device).clamp(min=0)
    logprobs = score(logits, row_temperatures(given, logits), tokens).logprobs.tolist()
    for row, each in enumerate(params):
        if each.logprobs_mode == "tempered" and row not in out.errors:
            out.logprobs[row] = logprobs[row]


def _top(num_top: np.ndarray, drawn: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and log-probs float32 [N, k]; -1 and -inf in rows that cannot be sampled or did not ask."""
    ids, logprobs = (part.t().numpy() for part in drawn[4:].chunk(2))
    told = (drawn[2].numpy() > 0) & (num_top > 0)
    return (
        np.where(told[:, None], ids, -1).astype(np.int32),
        np.where(told[:, None], logprobs, -np.inf).astype(np.float32),
    )
