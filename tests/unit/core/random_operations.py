"""Random operations on a rig: requests whose prompts share prefixes, aborts, new weights, failures."""

import random

from rollout_engine.base.pooling_params import PoolingParams

SALTS = ("", "", "", "tenant")

SHAPES = {
    "roomy": dict(num_blocks=200, block_size=4, max_num_seqs=16, max_num_batched_tokens=64),
    "tiny pool": dict(num_blocks=17, block_size=4, max_num_seqs=8, max_num_batched_tokens=32),
    "tiny pool, no prefix cache": dict(
        num_blocks=20, block_size=4, max_num_seqs=6, max_num_batched_tokens=16, enable_prefix_caching=False
    ),
    "one token a block": dict(num_blocks=80, block_size=1, max_num_seqs=5, max_num_batched_tokens=7),
    "wide blocks, few slots": dict(num_blocks=9, block_size=16, max_num_seqs=3, max_num_batched_tokens=20),
    "little prefill beside decode": dict(
        num_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=32, max_prefill_beside_decode=5
    ),
    "small budget": dict(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=3),
}


class Monkey:
    """Chooses the operations. Prompts share prefixes; end ids are frequent in the small vocabulary."""

    def __init__(self, rig, seed):
        self.rig = rig
        self.random = random.Random(seed)
        self.capacity = min(64, rig.config.num_blocks * rig.config.block_size + 1)
        self.prefixes = [[self.random.randrange(23) for _ in range(40)] for _ in range(3)]
        self.num_added = 0

    def act(self):
        actions = {
            self.step: 70,
            self.add: 20,
            self.abort: 4,
            self.commit: 3,
            self.spoil_step: 0.5,
            self.spoil_token: 1,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()

    def step(self):
        self.rig.step()

    def add(self):
        choose = self.random
        if self.rig.core.num_unfinished_requests > 12:
            return
        known = self._next_turn() if self.rig.ends and choose.random() < 0.3 else choose.choice(self.prefixes)
        prompt = known[: choose.randint(1, 40)] + [choose.randrange(23) for _ in range(choose.randint(0, 3))]
        prompt = prompt[: self.capacity - 1]
        max_tokens = choose.randint(1, min(24, self.capacity - len(prompt)))
        self.num_added += 1
        if choose.random() < 0.2:
            pooling = PoolingParams(kind=choose.choice(["last", "mean", "cls", "token"]))
            priority, salt = choose.choice([0, 0, 1, -1]), choose.choice(SALTS)
            self.rig.add(f"r{self.num_added}", prompt, priority=priority, salt=salt, pooling=pooling)
            return
        self.rig.add(
            f"r{self.num_added}",
            prompt,
            max_tokens=max_tokens,
            min_tokens=choose.choice([0, 0, min(3, max_tokens)]),
            seed=choose.randrange(2**64),
            eos=choose.choice([[], [3]]),
            stop_token_ids=choose.choice([None, [5, 11]]),
            n=choose.choice([1, 1, 1, 2, 3, 8]),
            priority=choose.choice([0, 0, 0, 1, -1]),
            salt=choose.choice(SALTS),
            prompt_logprobs=choose.choice([None, None, None, 0, 2]),
            return_routed_experts=self.num_added % 3 == 0,
            return_hidden_states=(None, "sampled", "all", None)[self.num_added % 4 * bool(self.rig.config.pooling)],
        )

    def _next_turn(self):
        """Everything that a sequence had when it ended."""
        request_id, index = self.random.choice(list(self.rig.ends))
        return self.rig.requests[request_id].prompt_token_ids + self.rig.tokens[request_id, index]

    def abort(self):
        live = [key for key in self.rig.tokens if key not in self.rig.ends]
        if live:
            request_id, index = self.random.choice(live)
            self.rig.abort(self.random.choice([request_id, f"{index}_{request_id}", "stranger"]))

    def commit(self):
        version = self.rig.core.policy_version + self.random.choice([1, 1, 1, 5, 0, -2])
        num_live = self.rig.commit(version, self.random.choice(["keep", "keep", "recompute"]))
        assert num_live == self.rig.core.num_unfinished_requests

    def spoil_step(self):
        self.rig.fail_at_steps.add(self.rig.next_step)

    def spoil_token(self):
        live = [key for key in self.rig.tokens if key not in self.rig.ends]
        if live:
            request_id, index = self.random.choice(live)
            self.rig.errors[self.rig.requests[request_id].first_sequence_id + index] = "spoilt"
