"""Rollouts made up from random tokens: no engine, no model."""

import random

import numpy as np
import pytest

from rollout_engine.base.outputs import CompletionOutput, RequestOutput, VersionSpan
from rollout_engine.batches.rollout_batch import rollout_batch

PAD = 99


def completion(rng, index, num_tokens, kept):
    logprobs = np.array([-rng.random() * 9 for _ in range(num_tokens)], np.float32)
    cut = rng.randint(0, num_tokens)
    spans = [VersionSpan(0, cut, 1, 1), VersionSpan(cut, num_tokens, 2, 1)]
    return CompletionOutput(
        index=index,
        text=f"répónse {rng.randrange(10**9)}\n",
        token_ids=[rng.randrange(90) for _ in range(num_tokens)],
        logprobs=logprobs,
        top_logprobs=None,
        cumulative_logprob=float(logprobs.sum()),
        kept_logprob_mass=logprobs / 10 if kept else None,
        finish_reason=rng.choice(["stop", "length", "abort"]),
        stop_reason=None,
        version_spans=[span for span in spans if span.start < span.end],
        seed=rng.getrandbits(64),
    )


@pytest.fixture
def make_batch():
    """make_batch(seed, layout=..., ...) -> a random rollout; the same seed gives the same one in either layout."""

    def make(seed=0, layout="padded", num_groups=3, num_samples=None, kept=False, rewards=True, columns=True):
        rng = random.Random(seed)
        outputs = []
        for name in range(num_groups):
            num = num_samples or rng.randint(1, 4)
            samples = [completion(rng, index, rng.randrange(9), kept) for index in range(num)]
            prompt = [rng.randrange(90) for _ in range(rng.randint(1, 6))]
            outputs.append(RequestOutput(str(name), f"prompt {seed} {name}", prompt, None, samples, True, 0))
        return rollout_batch(
            outputs,
            pad_token_id=PAD,
            columns={"answer": [{"gold": [name, "ä"]} for name in range(num_groups)]} if columns else None,
            rewards=[[rng.random() for _ in output.outputs] for output in outputs] if rewards else None,
            layout=layout,
        )

    return make
