"""Sampling parameters that a session forces on its requests."""

from typing import Any

import msgspec

from rollout_engine.base.sampling_params import SamplingParams

DRAWS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
)
"""Parameters of the distribution that is drawn from. They replace an agent's own even if they are the defaults."""


def forced_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that a session forces if all its requests are to be sampled by `params`."""
    fields, default = msgspec.structs.asdict(params), SamplingParams()
    return {name: value for name, value in fields.items() if name in DRAWS or value != getattr(default, name)}
