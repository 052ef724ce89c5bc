"""The bound on log-probs of prompts in the answer to one HTTP call."""

from collections.abc import Sequence

from rollout_engine.errors import RequestError
from rollout_engine.sampling_params import MAX_PROMPT_LOGPROB_VALUES
from rollout_engine.text.input_processor import CheckedPrompt


def check_prompt_logprobs(prompts: Sequence[CheckedPrompt], vocab_size: int, *, repeats: bool) -> None:
    """Raise `RequestError` if the prompts of a call ask together for more log-probs than one prompt may.

    `repeats`: whether each choice of a prompt is answered with them.
    """
    count = most = 0
    for prompt in prompts:
        asked = prompt.params.prompt_logprobs
        if asked is not None:
            width = vocab_size if asked == -1 else max(asked, 1)
            count += len(prompt.token_ids) * width * (prompt.params.n if repeats else 1)
            most = max(most, asked, key=lambda each: vocab_size if each == -1 else each)
    if count > MAX_PROMPT_LOGPROB_VALUES:
        of = f"{len(prompts)} prompts" if len(prompts) > 1 else "the prompt"
        what = f"The tokens of {of}, {'in every choice, ' if repeats else ''}have {count} log-probs together"
        hint = f"{what}. Send fewer prompts a call, or ask for a smaller n or fewer log-probs."
        bound = f"at most {MAX_PROMPT_LOGPROB_VALUES} log-probs of prompts in one answer"
        raise RequestError.for_field("prompt_logprobs", most, bound, hint)
