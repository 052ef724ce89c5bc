"""TorchRL's wrapper of the trained model, with log-probs by the engine's arithmetic."""

from typing import Any

import torch
from torch import Tensor
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm import TransformersWrapper

from rollout_engine import exact
from rollout_engine.base.errors import ConfigError


class ExactTransformersWrapper(TransformersWrapper):  # type: ignore[misc]  # TorchRL has no types
    """A `TransformersWrapper` whose log-probs, and those in `GRPOLoss`, equal the engine's bit for bit.

        actor = ExactTransformersWrapper(exact.enable(model), tokenizer=tokenizer, input_mode="tokens", generate=False)
        loss = GRPOLoss(actor)

    TorchRL pads on the left, which an exact model refuses, and takes log-probs by cross entropy, whose last bits are
    others. Here rows are moved to the left for the model and back again, and log-probs are `exact.logprobs_of`.
    Entropies are TorchRL's, with their gradient. Generating and packed inputs (`pad_model_input=False`) are refused.
    """

    def __init__(self, model: Any, *, generate: bool = False, pad_model_input: bool = True, **options: Any) -> None:
        """Options are those of `TransformersWrapper`. Raises `ConfigError`."""
        if generate:
            raise ConfigError(
                "ExactTransformersWrapper computes log-probs: make it with generate=False. EnginePolicy generates."
            )
        if not pad_model_input:
            raise ConfigError(
                "ExactTransformersWrapper takes padded rows: leave out pad_model_input=False. In TorchRL's packed rows "
                "tokens attend to later ones, so their log-probs are not the model's."
            )
        super().__init__(model, generate=False, pad_model_input=True, **options)

    def _model_forward_with_padded_sequences(
        self,
        tokens_full_padded: Tensor,
        attention_mask_full_padded: Tensor,
        *,
        pad_val: Any = None,
        logits_only: bool = False,
        **_: Any,
    ) -> tuple[Tensor | None, Tensor]:
        """Log-probs [B, T] (None if `logits_only`) and logits [B, T, V] that belong to the token at their place."""
        real = attention_mask_full_padded.bool()
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        ids, present = tokens_full_padded.gather(1, order), real.gather(1, order)
        length = int(present.sum(1).max())
        logits = self.model(
            input_ids=ids[:, :length], attention_mask=present[:, :length].to(torch.int64), use_cache=False
        ).logits
        before = logits.new_zeros(*real.shape, logits.shape[-1])
        rows, places = present[:, 1:length].nonzero(as_tuple=True)
        before = before.index_put((rows, order[rows, places + 1]), logits[rows, places])
        if logits_only:
            return None, before
        predicted = real.clone()
        predicted[torch.arange(len(real)), order[:, 0]] = False
        logprobs = before.new_zeros(real.shape, dtype=torch.float32)
        return logprobs.index_put(
            (predicted,), exact.logprobs_of(before[predicted], tokens_full_padded[predicted])
        ), before

    def _get_sft_dist(self, tensordict: Any, **options: Any) -> "ExactCategorical":
        return ExactCategorical.like(super()._get_sft_dist(tensordict, **options))

    def _get_rlhf_dist(self, tensordict: Any, **options: Any) -> "ExactCategorical":
        return ExactCategorical.like(super()._get_rlhf_dist(tensordict, **options))

    def _get_generic_dist(self, tensordict: Any, **options: Any) -> "ExactCategorical":
        return ExactCategorical.like(super()._get_generic_dist(tensordict, **options))


class ExactCategorical(LLMMaskedCategorical):  # type: ignore[misc]
    """TorchRL's distribution of tokens, whose log-probs are by the engine's arithmetic; 0 if masked."""

    @classmethod
    def like(cls, dist: Any) -> "ExactCategorical":
        """The same logits and mask."""
        return cls(logits=dist.logits, mask=dist.mask)

    def log_prob(self, value: Tensor) -> Tensor:
        """float32 [B, T] of token ids [B, T]."""
        mask = self.mask.bool()
        found = exact.logprobs_of(self.logits[mask], value[mask])
        return found.new_zeros(mask.shape).index_put((mask,), found)
