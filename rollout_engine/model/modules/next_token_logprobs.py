"""Log-probs of next tokens by a Hugging Face module, as trainers compute them."""

from typing import NamedTuple

from torch import Tensor, nn

from rollout_engine.kernels.token_logprobs import RowStatsKernel, token_logprobs
from rollout_engine.model.modules.packed_rows import sharing_prefixes
from rollout_engine.model.modules.placed_features import PlacedFeatures, placing
from rollout_engine.model.modules.shared_rows import SharedRows


class NextTokens(NamedTuple):
    """Logits of M next tokens of a batch [B, T], and their places in it."""

    logits: Tensor
    """[M, V]."""
    token_ids: Tensor
    """int64 [M]."""
    wanted: Tensor
    """bool [B, L]: whether the next token is real; L + 1 tokens are in the longest row."""
    places: Tensor | None = None
    """int64 [number of wanted]: which of the M each of them is; None: they are the M, in order."""

    def logprobs(self, temperature: float, kernel: RowStatsKernel) -> Tensor:
        """float32 [M]."""
        return token_logprobs(self.logits, self.token_ids, temperature, kernel)

    def spread(self, values: Tensor, length: int) -> Tensor:
        """Values [M] -> [B, length], 0 if no next token is wanted."""
        values = values if self.places is None else values.index_select(0, self.places)
        result = values.new_zeros(len(self.wanted), length)
        return result.index_put(self.wanted.nonzero(as_tuple=True), values)


def next_tokens(logits: Tensor, input_ids: Tensor, wanted: Tensor) -> NextTokens:
    """Next tokens of input_ids int64 [B, T], with logits [B, L, V], at which `wanted`, bool [B, L], is true."""
    return NextTokens(logits[wanted], input_ids[:, 1 : wanted.shape[1] + 1][wanted], wanted)


def right_padded_next_tokens(
    model: nn.Module, input_ids: Tensor, real: Tensor, features: PlacedFeatures | None = None
) -> NextTokens:
    """Compute the next tokens of input_ids int64 [B, T] whose real tokens, by `real` bool [B, T], stand to the left."""
    length = max(int(real.sum(1).max()), 2)
    with placing(features and features.first(length)):
        logits = model(input_ids=input_ids[:, :length], use_cache=False).logits[:, :-1]
    return next_tokens(logits, input_ids, real[:, 1:length])


def shared_next_tokens(
    model: nn.Module, input_ids: Tensor, real: Tensor, features: PlacedFeatures | None = None
) -> NextTokens:
    """Do as `right_padded_next_tokens`, but compute common beginnings of rows once, and no padding."""
    rows = SharedRows.of(input_ids, real, features and features.keys(input_ids))
    with sharing_prefixes(), placing(features and features.take(rows.tokens)):
        logits = logits_at(rows.sources, model, input_ids=rows.input_ids, position_ids=rows.position_ids)
    return NextTokens(logits, rows.targets, rows.wanted, rows.places)


def logits_at(tokens: Tensor, model: nn.Module, **inputs: Tensor | None) -> Tensor:
    """Logits [M, V] behind `tokens` int64 [M] of a single row of `inputs`; the head computes no others."""
    logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=tokens).logits
    return logits.flatten(0, 1)
