"""The trainer's side of the numerics contract: the engine's own arithmetic, with gradients.

    model = exact.load(path)            # with the weights of an engine of the same path, also if they are quantised
    model = exact.enable(AutoModelForCausalLM.from_pretrained(...))            # .to("cuda"), before it is enabled
    logprobs = exact.token_logprobs(model, batch)
    logprobs = exact.token_logprobs(model, batch["tokens", "full"], batch["masks", "all_attention_mask"])  # the same

`logprobs[:, i]` belongs to token `i + 1` and equals the engine's `batch["log_probs", "full"][:, i + 1]` bit for bit,
wherever a token's whole context was computed under the trainer's current weights. On-policy ratios are exactly 1.0.
Packed rows (several sequences end to end) are described by `cu_seqlens`, or by positions that restart at 0. What padded
rows begin with alike, such as the prompt of a group's samples, is computed once, and their padding never. Pictures
of a rollout are `**exact.inputs(batch)`. A model on the CPU matches engines on the CPU; one on a CUDA device matches
engines with `device="cuda", deterministic=True`.
"""

from rollout_engine.exact.distributions import FullReport
from rollout_engine.exact.enabling import enable
from rollout_engine.exact.inputs import inputs
from rollout_engine.exact.load import load
from rollout_engine.exact.report import ExactReport, check
from rollout_engine.exact.trainer import (
    logprobs_of,
    token_entropy,
    token_logprobs,
    token_logprobs_and_entropies,
)

__all__ = [
    "ExactReport",
    "FullReport",
    "check",
    "enable",
    "inputs",
    "load",
    "logprobs_of",
    "token_entropy",
    "token_logprobs",
    "token_logprobs_and_entropies",
]
