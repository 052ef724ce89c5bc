"""Figures of prompts are on their way while later steps are launched, and whole when results are asked for."""

import numpy as np
import torch

from rollout_engine.base.messages import NewSequence, ScheduledSequence
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.sampling.prompt_logprobs import PromptScorer

VOCAB_SIZE = 11
PROMPT = [3, 1, 4, 1, 5, 9, 2]
LOGITS = torch.randn(len(PROMPT), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def score(chunks, scorer):
    """Launch the chunks of one prompt; returns the functions that wait for their results."""
    sequence = NewSequence(0, list(PROMPT), len(PROMPT), SamplingParams(prompt_logprobs=3, temperature=0.7), seed=0)
    waits, start = [], 0
    for size in chunks:
        scheduled = [ScheduledSequence(0, start, size, [0])]
        scorer.add([sequence] if start == 0 else [], scheduled)
        rows = scorer.rows(scheduled)
        waits.append(scorer.score(LOGITS[start : start + size][rows]))
        start += size
    return waits


def test_results_that_arrive_late_are_those_that_are_there_at_once():
    under_way = []

    def fetch(tensor):
        """A copy that is made when somebody waits for it."""
        under_way.append(tensor)
        return lambda: under_way.pop(0).clone()

    late, at_once = (score([2, 4, 1], scorer) for scorer in (PromptScorer(VOCAB_SIZE, fetch=fetch), PromptScorer(11)))
    assert len(under_way) == 8, "log-probs, ranks, ids and log-probs of top tokens of two chunks; the last has none"
    (mine,), (other,) = ([wait() for wait in waits][-1].values() for waits in (late, at_once))
    assert not under_way and late[0]() == {}, "asked again, nothing is waited for again"
    assert np.isnan(mine.logprobs).tolist() == [True] + [False] * (len(PROMPT) - 1)
    for ours, theirs in ((mine.logprobs, other.logprobs), (mine.ranks, other.ranks)):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(mine.top_logprobs, other.top_logprobs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
