"""One token's share of the columns that came back from the runner."""

import numpy as np

from rollout_engine.messages import ModelRunnerOutput
from rollout_engine.sampling_params import SamplingParams

TopLogprobs = tuple[np.ndarray, np.ndarray]


def token_columns(
    result: ModelRunnerOutput, index: int, params: SamplingParams
) -> tuple[list[float] | None, list[float] | None, TopLogprobs | None]:
    """(logprobs, kept_logprob_mass, top_logprobs [1, k]) of sample `index`, each only where `params` ask for it."""
    logprobs = [result.logprobs[index]] if result.logprobs is not None else None
    kept = [result.kept_logprob_mass[index]] if params.truncates and result.kept_logprob_mass is not None else None
    top = None
    if params.logprobs and result.top_logprobs is not None:
        ids, values = result.top_logprobs
        top = (ids[index : index + 1, : params.logprobs], values[index : index + 1, : params.logprobs])
    return logprobs, kept, top
