"""Drafts that are right as often as a test wants."""

import random

from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.core.speculation import Speculator

CHEAP_ROWS = ((1, 1.0), (64, 1.1))
"""Every draft pays."""


class Oracle(Speculator):
    """Drafts what the fake model will draw, each token wrong with some probability."""

    def __init__(self, rig, *, right=0.7, seed=0):
        core = rig.core._scheduler
        super().__init__(rig.config, SpeculationConfig(), core.tables)
        self.rig, self.random, self.right = rig, random.Random(seed), right
        core.speculator = self

    def _draft(self, sequence):
        tokens = self.rig.truth(self.rig.keys[sequence.sequence_id])[0]
        start = len(sequence.token_ids) - sequence.num_prompt_tokens
        room = min(self.random.randint(0, 8), sequence.max_num_tokens - len(sequence.token_ids) - 1)
        found = tokens[start : start + room]
        found += [0] * (room - len(found))  # behind a stop
        vocab_size = self.rig.config.vocab_size
        return [t if self.random.random() < self.right else self.random.randrange(vocab_size) for t in found]

    def _choose(self, proposals, num_rows, num_samples):
        left, counts = self.rig.config.max_num_batched_tokens - num_rows, []
        for each in proposals:
            counts.append(min(len(each.token_ids), left))
            left -= counts[-1]
        return counts


def make_oracle_rig(make_rig, right=0.7, **settings):
    """A rig whose sequences are drafted for."""
    rig = make_rig(speculation=SpeculationConfig(), step_seconds=CHEAP_ROWS, **settings)
    Oracle(rig, right=right)
    return rig
