"""Log-probs of TRL's trainers by the engine's arithmetic."""

from typing import Any

import torch
from torch import Tensor, nn

from envs_adapters.trainers.trl_pictures import picture_inputs
from rollout_engine import exact
from rollout_engine.base.errors import ConfigError

DIFFERENCE = "sampling/sampling_logp_difference/max"
"""TRL's name of this metric."""


class ExactLogprobs:
    """Makes a `GRPOTrainer` compute log-probs bit for bit as the engine does; to be named before it as a base class.

        class ExactGRPOTrainer(ExactLogprobs, GRPOTrainer): ...

        trainer = ExactGRPOTrainer(exact.enable(AutoModelForCausalLM.from_pretrained(path)), ...)

    TRL pads prompts on the left and multiplies by the head in tiles, so its own log-probs differ from any engine's in
    the last bits, also of an exact model. This computes them by `exact.token_logprobs`, at the trainer's temperature.
    Logits of a micro-batch's tokens are held at once, while TRL holds tiles of them.

    It also logs, if TRL does not, `sampling/sampling_logp_difference/max`: the largest difference between the
    log-probs passed with the completions and these, before the weights changed. That needs no forward of its own.
    """

    temperature: float
    _expected: tuple[Tensor, Tensor] | None = None
    """For the batch whose loss is computed: the log-probs passed with it, and the mask of its sampled tokens."""

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        sampled, before = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
        if sampled is not None and "importance_sampling_ratio" not in inputs:
            real = inputs["completion_mask"].bool()
            if "tool_mask" in inputs:
                real = real & inputs["tool_mask"].bool()
            if before is None:  # the weights are still those of the completions
                self._expected = sampled, real
            else:
                self._log_difference(before, sampled, real)
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        return loss

    def _log_difference(self, ours: Tensor, sampled: Tensor, real: Tensor) -> None:
        trainer: Any = self
        largest = (ours.detach() - sampled)[real].abs().max() if real.any() else ours.new_zeros(())
        mode = "train" if trainer.model.training else "eval"
        trainer._metrics[mode][DIFFERENCE].append(trainer.accelerator.gather(largest).max().item())

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probs of the last `logits_to_keep` tokens and, on request, entropies: float32 [B, logits_to_keep].

        `batch_size` rows at a time. Entropies carry no gradient. Raises `ConfigError` for options without exact equals.
        """
        self._refuse(compute_aux_loss)
        logprobs, entropies = [], []
        num_rows = len(input_ids)
        for start in range(0, num_rows, batch_size or num_rows):
            end = min(start + (batch_size or num_rows), num_rows)
            given: Any = (model, input_ids[start:end], attention_mask[start:end])
            options: Any = {"temperature": self.temperature, **picture_inputs(multimodal, start, end, num_rows)}
            if compute_entropy:
                values, spread = exact.token_logprobs_and_entropies(*given, **options)
                entropies.append(spread[:, -logits_to_keep:])
            else:
                values = exact.token_logprobs(*given, **options)
            logprobs.append(values[:, -logits_to_keep:])
        result = torch.cat(logprobs)
        if self._expected is not None:
            self._log_difference(result, *self._expected)
            self._expected = None
        return result, torch.cat(entropies) if compute_entropy else None, None

    def _refuse(self, compute_aux_loss: bool) -> None:
        if compute_aux_loss:
            raise ConfigError(
                "ExactLogprobs has no load-balancing loss of a mixture of experts: set "
                "GRPOConfig(router_aux_loss_coef=0.0)."
            )
        if getattr(self, "_entropy_bonus_enabled", False):
            raise ConfigError(
                "ExactLogprobs computes entropies without a gradient, so they cannot be part of the loss: leave out "
                "GRPOConfig's entropy_coef and use_adaptive_entropy."
            )
