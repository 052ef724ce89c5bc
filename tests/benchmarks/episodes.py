"""How busy episodes keep an engine whose environments take their time, and what the loop around them costs.

1,000 episodes of four turns, of which each takes the environment 50 ms, against requests of one turn: as many, and of
the same lengths (the tokens that a turn adds, and those that it samples). `busy_ratio` is the share of the time in
which the engine computes a step, with episodes over with requests; `batch_ratio` the same of sequences in a step.
`throughput_ratio`, of tokens a second, is below both: a step of episodes is longer, since it attends to all earlier
turns. `loop_microseconds_per_turn` is what this thread computes for a turn of an episode, outside the engine's steps,
beyond what it computes for a request; `text_microseconds_per_turn` of it are the chat template's and the tokenizer's.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict
from works import MAX_MODEL_LEN, SHAPES

from envs_adapters import Observation
from rollout_engine import RolloutPolicy, SamplingParams
from rollout_engine.testing import tiny_checkpoint

NUM_EPISODES, _NUM_TURNS, _NUM_SAMPLED = 1000, 4, 16
_ENV_SECONDS = 0.05
_PARAMS = SamplingParams(max_tokens=_NUM_SAMPLED, ignore_eos=True)


class Sleeps:
    """Takes its time to say what comes next."""

    def reset(self, seed: int) -> str:
        self.draws, self.left = random.Random(seed), _NUM_TURNS
        time.sleep(_ENV_SECONDS)
        return self.words()

    def step(self, action: Any) -> Observation:
        time.sleep(_ENV_SECONDS)
        return self.answer()

    def words(self) -> str:
        return "".join(self.draws.choices("abcdefgh ", k=self.draws.randint(15, 25)))

    def answer(self) -> Observation:
        self.left -= 1
        return Observation(self.words(), reward=1.0, terminated=not self.left)


class Awaits(Sleeps):
    """The same on an event loop."""

    async def reset(self, seed: int) -> str:  # type: ignore[override]
        self.draws, self.left = random.Random(seed), _NUM_TURNS
        await asyncio.sleep(_ENV_SECONDS)
        return self.words()

    async def step(self, action: Any) -> Observation:  # type: ignore[override]
        await asyncio.sleep(_ENV_SECONDS)
        return self.answer()


ENVIRONMENTS = {"on threads": Sleeps, "on an event loop": Awaits}


@contextlib.contextmanager
def policy(directory: Path) -> Iterator[RolloutPolicy]:
    """A policy of shape S with a tokenizer."""
    shape = {name: value for name, value in SHAPES["S"].items() if name not in ("dtype", "vocab_size")}
    checkpoint = tiny_checkpoint(directory, max_position_embeddings=MAX_MODEL_LEN, **shape)
    with RolloutPolicy.from_pretrained(checkpoint, dtype=SHAPES["S"]["dtype"], max_model_len=MAX_MODEL_LEN) as made:
        yield made


def measure(made: RolloutPolicy, environment: type, rounds: int) -> dict[str, Any]:
    """Medians of rounds in which episodes and requests take turns."""
    clock = _Clock(made)
    episodes, requests = [], []
    for index in range(rounds + 1):  # the first round warms up
        played, one = clock.time(lambda i=index: _play(made, environment, i))
        prompts = _prompts(played, index)
        _, other = clock.time(lambda p=prompts: made.rollout(p, _PARAMS, use_tqdm=False))
        episodes.append(one)
        requests.append(other)
    num_turns, pairs = NUM_EPISODES * _NUM_TURNS, list(zip(episodes[1:], requests[1:], strict=True))
    busy = [one.busy / other.busy for one, other in pairs]
    return {
        "busy_ratio": round(statistics.median(busy), 3),
        "batch_ratio": round(statistics.median(other.num_steps / one.num_steps for one, other in pairs), 3),
        "throughput_ratio": round(statistics.median(other.seconds / one.seconds for one, other in pairs), 3),
        "loop_microseconds_per_turn": round(
            1e6 * statistics.median(one.own_cpu - other.own_cpu for one, other in pairs) / num_turns, 1
        ),
        "text_microseconds_per_turn": round(1e6 * statistics.median(one.text_cpu for one, _ in pairs) / num_turns, 1),
        "turns_per_second": round(num_turns / statistics.median(one.seconds for one, _ in pairs)),
        "requests_per_second": round(num_turns / statistics.median(other.seconds for _, other in pairs)),
        "busy_ratios": [round(ratio, 3) for ratio in busy],
    }


def _play(made: RolloutPolicy, environment: type, seed: int) -> TensorDict:
    played = made.rollout(None, _PARAMS, env=environment, num_episodes=NUM_EPISODES, seed=seed, use_tqdm=False)
    assert played["num_turns"].sum() == NUM_EPISODES * _NUM_TURNS
    return played


def _prompts(played: TensorDict, seed: int) -> list[list[int]]:
    """For each turn of each episode a prompt of as many tokens as it adds, which nothing else begins with."""
    draws, prompts = random.Random(seed), []
    for turns, present in zip(
        played["masks", "turn"].tolist(), played["masks", "all_attention_mask"].tolist(), strict=True
    ):
        num_new = 0
        for turn, is_there in zip(turns, present, strict=True):
            if not is_there:
                continue
            if turn < 0:
                num_new += 1
            elif num_new:
                prompts.append(draws.choices(range(3, 250), k=num_new + (turn > 0)))  # the last token has no KV yet
                num_new = 0
    assert len(prompts) == NUM_EPISODES * _NUM_TURNS
    draws.shuffle(prompts)
    return prompts


class _Times(NamedTuple):
    seconds: float
    own_cpu: float
    """Seconds that this thread computed outside the core's steps."""
    text_cpu: float
    """Of these, in the chat template and the tokenizer's encoding."""
    busy: float
    """Share of the time in the core's steps."""
    num_steps: int


class _Clock:
    """Times a call, and the core's steps and the making of prompts in it."""

    def __init__(self, made: RolloutPolicy) -> None:
        core, codec = made.frontend.client.driver.core, made.frontend.inputs.codec
        assert codec is not None
        self._step = core.step
        core.step = self._timed_step
        for name in ("render_chat", "encode"):
            setattr(codec, name, self._timed_text(getattr(codec, name)))
        self._begin()

    def time(self, call: Any) -> tuple[Any, _Times]:
        self._begin()
        start, cpu = time.perf_counter(), time.thread_time()
        result = call()
        seconds, own_cpu = time.perf_counter() - start, time.thread_time() - cpu - self._step_cpu
        return result, _Times(seconds, own_cpu, self._text_cpu, self._step_seconds / seconds, self._num_steps)

    def _begin(self) -> None:
        self._step_seconds = self._step_cpu = self._text_cpu = 0.0
        self._num_steps = 0

    def _timed_text(self, method: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            cpu = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self._text_cpu += time.thread_time() - cpu

        return timed

    def _timed_step(self) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return self._step()
        finally:
            self._step_seconds += time.perf_counter() - start
            self._step_cpu += time.thread_time() - cpu
            self._num_steps += 1
