"""Log-probs of next tokens by a Hugging Face module: the one way of trainers, and of engines on the CPU that score."""

from torch import Tensor, nn

from rollout_engine.kernels.token_logprobs import RowStatsKernel, token_logprobs


def right_padded_logprobs(
    model: nn.Module, input_ids: Tensor, real: Tensor, temperature: float, kernel: RowStatsKernel
) -> Tensor:
    """float32 [B, T - 1] of input_ids int64 [B, T] whose real tokens, by `real` bool [B, T], stand to the left."""
    wanted, logits = right_padded_logits(model, input_ids, real)
    return logprobs_where(wanted, logits, input_ids, temperature, kernel)


def right_padded_logits(model: nn.Module, input_ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the next token is real, bool [B, L], and logits [B, L, V]; L + 1 tokens are in the longest row."""
    length = max(int(real.sum(1).max()), 2)
    logits = model(input_ids=input_ids[:, :length], use_cache=False).logits[:, :-1]
    return real[:, 1:length], logits


def logprobs_where(
    wanted: Tensor, logits: Tensor, input_ids: Tensor, temperature: float, kernel: RowStatsKernel
) -> Tensor:
    """float32 [B, T - 1] from logits [B, L, V]: of the next tokens where `wanted` bool [B, L], 0 elsewhere."""
    chosen = input_ids[:, 1 : wanted.shape[1] + 1][wanted]
    values = token_logprobs(logits[wanted], chosen, temperature, kernel)
    return spread_where(wanted, values, input_ids)


def spread_where(wanted: Tensor, values: Tensor, input_ids: Tensor) -> Tensor:
    """[B, T - 1] with `values` [N], in order, where `wanted` bool [B, L] is True, and 0 elsewhere."""
    result = values.new_zeros(input_ids.shape[0], input_ids.shape[1] - 1)
    return result.index_put(wanted.nonzero(as_tuple=True), values)
