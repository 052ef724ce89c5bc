"""Bounds on the texts of one HTTP call, and on log-probs of prompts and hidden states in the answer to it."""

from collections.abc import Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROB_VALUES
from rollout_engine.serve.served import Served
from rollout_engine.text.input_processor import CheckedPrompt

_TEXT_CHARS, _CHARS_PER_TOKEN = 1 << 22, 64
"""Characters that one text may have at least, and for each token of the longest sequence."""
MAX_HIDDEN_VALUES = 1 << 23
"""Values of hidden states in one answer: up to 180 MB of JSON as SGLang's clients read them."""


def check_hidden_states(prompts: Sequence[CheckedPrompt], hidden_size: int) -> None:
    """Raise `RequestError` if the answer to prompts would have more values of hidden states than one may have."""
    count = 0
    for prompt in prompts:
        asked = prompt.params.return_hidden_states
        if asked is not None:
            num_prompt = len(prompt.token_ids) if asked == "all" else 0
            count += prompt.params.n * (num_prompt + prompt.max_tokens) * hidden_size  # each choice has the prompt's
    if count > MAX_HIDDEN_VALUES:
        bound = f"at most {MAX_HIDDEN_VALUES} values of hidden states in one answer"
        hint = "Ask for fewer tokens, or with LLM and AsyncLLM, which hand out arrays."
        raise RequestError.for_field("return_hidden_states", count, bound, hint)


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


def check_text_size(served: Served, prompt: Any) -> None:
    """Raise `RequestError` for a prompt with more characters than are encoded for one request.

    Few tokenizers let us prove how many characters a token may stand for; encoding takes some hundred bytes for each.
    """
    most = max(_TEXT_CHARS, _CHARS_PER_TOKEN * served.max_model_len)
    if isinstance(prompt, dict) and "messages" in prompt:
        size, field = _num_chars(prompt["messages"]), "messages"
    else:
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        size, field = len(text) if isinstance(text, str) else 0, "prompt"
    if size > most:
        raise RequestError.for_field(field, f"{size} characters", f"at most {most} characters in one request")


def _num_chars(messages: Any) -> int:
    """Characters of the contents of messages that are texts, or lists of parts."""
    count = 0
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        count += sum(len(text) for text in texts if isinstance(text, str))
    return count
