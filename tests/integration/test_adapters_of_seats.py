"""An adapter that a rollout names plays the seats of the rollout's own policy, and no others."""

import pytest

from envs_adapters import Observation
from rollout_engine import RolloutPolicy
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model

SIZES = dict(num_kv_blocks=256, max_model_len=256)


class TwoSpeak:
    """Seat 0 speaks, then seat 1; neither hears the other."""

    num_seats = 2

    def reset(self, seed):
        self.turn = 0
        return Observation("begin: ", seat=0)

    def step(self, action):
        self.turn += 1
        return Observation("begin: ", seat=1, terminated=self.turn == 2)


@pytest.mark.parametrize("own", ["x", None])
def test_an_adapter_of_a_rollout_does_not_play_the_seats_of_another_policy(tmp_path, own):
    path, params = tiny_checkpoint(tmp_path, std=0.1), {"max_tokens": 8, "temperature": 0}

    def turns(policy, **options):
        batch = policy.rollout(None, params, env=TwoSpeak, use_tqdm=False, **options)
        assert batch["seat"].tolist() == [0, 1]
        return [list(batch["text", "response"])[seat] for seat in (0, 1)]

    with (
        RolloutPolicy.from_pretrained(path, **SIZES) as policy,
        RolloutPolicy.from_pretrained(path, **SIZES) as frozen,
    ):
        policy.add_lora(random_adapter(tiny_model(), "x", seed=1, std=1.0))
        if own:
            frozen.add_lora(random_adapter(tiny_model(), own, seed=2, std=1.0))
        alone, base = turns(policy, lora_request="x"), turns(policy)
        assert turns(policy, lora_request="x", seats={1: frozen}) == [alone[0], base[1]]
        assert alone[1] != base[1]
