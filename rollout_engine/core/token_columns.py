"""One token's share of the columns that came back from the runner."""

from rollout_engine.messages import EngineCoreOutput, ModelRunnerOutput
from rollout_engine.sampling_params import SamplingParams


def add_logprobs(output: EngineCoreOutput, result: ModelRunnerOutput, index: int, params: SamplingParams) -> None:
    """Fill the log-prob fields of `output` from sample `index` of `result`, each only where `params` ask for it."""
    if params.logprobs is None:
        return
    if result.logprobs is not None:
        output.new_logprobs = [result.logprobs[index]]
    if params.truncates and result.kept_logprob_mass is not None:
        output.new_kept_logprob_mass = [result.kept_logprob_mass[index]]
    if params.logprobs and result.top_logprobs is not None:
        ids, values = result.top_logprobs
        row, width = slice(index, index + 1), params.logprobs
        output.new_top_logprobs = (ids[row, :width], values[row, :width])
