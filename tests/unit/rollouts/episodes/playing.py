"""An environment and helpers for tests of episodes."""

import random

from envs_adapters import Observation
from rollout_engine.base.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=6)


class Counting:
    """Three turns; each reward is the number of sampled tokens. Records what it is told."""

    actions: list = []

    def reset(self, seed):
        self.random, self.turn = random.Random(seed), 0
        return f"begin {self.random.random():.3f}: "

    def step(self, action):
        self.turn += 1
        Counting.actions.append(action)
        return Observation(f" turn {self.turn}: ", float(len(action.token_ids)), terminated=self.turn == 3)


def play(policy, env=Counting, params=PARAMS, **options):
    return policy.rollout(None, params, env=env, **({"use_tqdm": False, "seed": 3} | options))


def row_ids(batch, row):
    mask = batch["masks", "all_attention_mask"][row]
    return batch["tokens", "full"][row][mask].tolist()


def sampled_turns(batch, row):
    """Sampled ids of each turn of a row."""
    tokens, turn = batch["tokens", "full"][row], batch["masks", "turn"][row]
    return [tokens[turn == number].tolist() for number in range(int(batch["num_turns"][row]))]


class Endless(Counting):
    def step(self, action):
        return Observation(" more ", 1.0)
