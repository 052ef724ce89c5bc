"""Comparison of whole distributions: a trainer's with those that an engine computes now, place by place."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.base.errors import RequestError
from rollout_engine.base.provenance import rollout_note
from rollout_engine.exact.trainer import kernels_of
from rollout_engine.kernels.token_logprobs import logprobs_at, row_temperatures
from rollout_engine.model.modules.packed_rows import positions_from
from rollout_engine.model.sampling.module_logits import module_logits
from rollout_engine.model.training.adapted_layers import plain_model
from rollout_engine.model.training.batch_pictures import TokenRun, sequences_of
from rollout_engine.model.training.rollout_inputs import PICTURES

_PIECE_NUMEL = 1 << 24
"""Log-probs that are compared at a time: 64 MiB of each side's."""


class HasDistributions(Protocol):
    """An engine that computes whole distributions: a `RolloutPolicy`."""

    def distributions(
        self, token_ids: Sequence[int], places: Sequence[int], *, temperature: float = 1.0, lora_request: Any = None
    ) -> np.ndarray:
        """Log-probs float32 [n, V] behind the first tokens of a sequence."""
        ...


class FullReport(NamedTuple):
    """Result of comparing whole distributions of a trainer and an engine; `print` gives a summary."""

    num_tokens: int
    """Sampled tokens whose distributions were compared."""
    vocab_size: int
    num_different: int
    """The number of distributions, among `num_tokens`, in which some log-prob is not equal bit for bit."""
    largest_difference: float
    """Largest absolute difference of two log-probs, in nats; inf if one of them alone is NaN or -inf."""
    largest_kl: float
    """Largest KL divergence of the trainer's distribution from the engine's, in nats."""
    mean_kl: float
    first_different: tuple[int, int] | None
    """(row, column) of the first token in `batch["tokens", "full"]` whose distributions differ."""
    differences: Tensor
    """float32, of the shape of `batch["tokens", "full"]`: the largest difference at each place; NaN if not compared."""
    kl: Tensor
    """float64, likewise: the sum of p (log p - log q), p the engine's distribution and q the trainer's."""

    @property
    def is_exact(self) -> bool:
        """Whether all compared log-probs are equal."""
        return self.num_different == 0

    def __str__(self) -> str:
        compared = f"{self.num_tokens} distributions of {self.vocab_size} tokens"
        if self.is_exact:
            return f"exact: {compared} equal bit for bit"
        return (
            f"not exact: {self.num_different} of {compared} differ, by up to {self.largest_difference:.3g} nats; "
            f"KL {self.mean_kl:.3g} on average, {self.largest_kl:.3g} at most; first at {self.first_different}"
        )


def compare_distributions(
    batch: Any, model: nn.Module, engine: HasDistributions, temperature: float | None
) -> FullReport:
    """Compare the distributions behind which a rollout's tokens were sampled, as `model` and `engine` compute them now.

    One sequence at a time, in pieces of at most 2**24 log-probs. `temperature`: None: that of the batch. Raises
    `RequestError` for a batch with pictures or of several adapters, or without a temperature.
    """
    temperature, lora = _settings(batch, temperature)
    ids, assistant = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
    differences, kl = torch.full(ids.shape, torch.nan), torch.full(ids.shape, torch.nan, dtype=torch.float64)
    own: Any = plain_model(model)
    vocab_size = own.config.get_text_config().vocab_size
    for run in _runs(batch):
        sampled = assistant[run.row, run.columns].nonzero()[:, 0]
        places, token_ids = sampled[sampled > 0].cpu(), ids[run.row, run.columns].tolist()
        pieces = _trainer_pieces(model, token_ids, places, temperature, vocab_size)
        for some, ours in pieces:
            given = engine.distributions(token_ids, some.tolist(), temperature=temperature, lora_request=lora)
            columns = run.columns.cpu()[some]
            found = _compare(ours, torch.from_numpy(given))
            differences[run.row, columns], kl[run.row, columns] = found
    return _report(differences, kl, vocab_size)


def _settings(batch: Any, temperature: float | None) -> tuple[float, str | None]:
    """Temperature and adapter of a rollout's distributions."""
    if PICTURES in batch.keys() and any(batch.get(PICTURES).tolist()):
        hint = "Whole distributions are compared without pictures; exact.check(batch, logprobs) compares with them."
        raise RequestError.for_field("batch['pictures']", "some", "absent", hint)
    note = rollout_note(batch["tokens", "full"])
    if temperature is None:
        temperature = None if note is None else note.sampled_temperature
    if temperature is None:
        raise RequestError.for_field("temperature", None, "a number", "The batch has no note of the one that sampled.")
    adapters = frozenset() if note is None else note.adapters
    if len(adapters) > 1:
        names = ", ".join(sorted("none" if name is None else name for name in adapters))
        raise RequestError.for_field("adapters that sampled the batch", names, "one", "Compare the rows of each alone.")
    return temperature or 1.0, next(iter(adapters), None)


def _runs(batch: Any) -> list[TokenRun]:
    ids = batch["tokens", "full"]
    if "cu_seqlens" in batch.keys():
        return sequences_of(torch.ones_like(ids, dtype=torch.bool), positions_from(batch["cu_seqlens"], ids.shape[1]))
    return sequences_of(batch["masks", "all_attention_mask"])


@torch.no_grad()
def _trainer_pieces(
    model: nn.Module, token_ids: list[int], places: Tensor, temperature: float, vocab_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some of `places` int64 [n] of a sequence, and the trainer's log-probs float32 [n, V] there."""
    if not len(places):
        return
    own: Any = plain_model(model)
    device = next(own.parameters()).device
    ids, rows = torch.tensor([token_ids], device=device), (places - 1).to(device)

    def forward(some: Tensor) -> Any:
        return model(input_ids=ids, use_cache=False, logits_to_keep=some)

    logits = module_logits(own, forward, rows, vocab_size, may_repeat=True)
    kernel = kernels_of(model).row_stats
    size = max(1, _PIECE_NUMEL // vocab_size)
    for start in range(0, len(places), size):
        some = logits.take(slice(start, min(start + size, len(places))))
        temperatures = row_temperatures(temperature, some)
        stats = kernel(some, temperatures, some.new_zeros(len(some), dtype=torch.int64))
        columns = stats.maximum[:, None], temperatures[:, None], stats.log_total[:, None]
        yield places[start : start + len(some)], logprobs_at(some, *columns).cpu()


def _compare(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Largest differences float32 [n], and KL divergences float64 [n], of log-probs float32 [n, V]; inf for NaN."""
    if ours.shape != theirs.shape:
        hint = "The trainer's model and the engine's are not the same."
        raise RequestError.for_field("engine's distributions", list(theirs.shape), f"{list(ours.shape)}", hint)
    gaps = (ours - theirs).abs().masked_fill_(ours == theirs, 0.0).nan_to_num_(torch.inf, torch.inf)
    weights = theirs.double().exp()
    terms = weights * (theirs.double() - ours.double())
    kl = terms.masked_fill_(weights == 0, 0.0).sum(-1).nan_to_num_(torch.inf).clamp_(min=0.0)
    return gaps.amax(-1), kl


def _report(differences: Tensor, kl: Tensor, vocab_size: int) -> FullReport:
    compared = ~differences.isnan()
    places = (compared & (differences > 0)).nonzero()
    found, divergences = differences[compared], kl[compared]
    return FullReport(
        num_tokens=len(found),
        vocab_size=vocab_size,
        num_different=len(places),
        largest_difference=float(found.max()) if len(found) else 0.0,
        largest_kl=float(divergences.max()) if len(found) else 0.0,
        mean_kl=float(divergences.mean()) if len(found) else 0.0,
        first_different=(int(places[0, 0]), int(places[0, 1])) if len(places) else None,
        differences=differences,
        kl=kl,
    )
