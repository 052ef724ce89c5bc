"""What edits of logits are, by their definition, and any that a request may ask for."""

import numpy as np
import torch
from hypothesis import strategies as st

from rollout_engine.base.messages import NewSequence
from rollout_engine.base.sampling_params import SamplingParams

VOCAB_SIZE = 23
EOS = 2


def sequence(prompt, output=(), *, params, bad_words=()):
    words = [list(word) for word in bad_words]
    return NewSequence(0, [*prompt, *output], len(prompt), params, seed=0, eos_token_ids=[EOS], bad_words=words)


def slow_edit(row, of):
    """The definition, one token at a time, in float32."""
    params, prompt, output = of.params, of.token_ids[: of.num_prompt_tokens], of.token_ids[of.num_prompt_tokens :]
    repetition, frequency, presence = map(
        np.float32, (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    result = []
    for token, x in enumerate(row.float().numpy()):
        if token in prompt or token in output:
            x = x / repetition if x > 0 else x * repetition
        times = output.count(token)
        if times:
            x = x - frequency * np.float32(times) - presence
        x = x + np.float32((params.logit_bias or {}).get(token, 0.0))
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        spoils = any(
            word[-1] == token and (len(word) == 1 or output[1 - len(word) :] == word[:-1]) for word in of.bad_words
        )
        stops = token == EOS or token in (params.stop_token_ids or ())
        result.append(-np.inf if not allowed or spoils or (stops and len(output) < params.min_tokens) else x)
    return torch.tensor(np.array(result, np.float32))


tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
penalties = st.floats(-2, 2)
some_params = st.builds(
    SamplingParams,
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100))),
    allowed_token_ids=st.one_of(st.none(), tokens),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.one_of(st.none(), tokens),
)
