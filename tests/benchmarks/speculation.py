"""What drafted tokens bring: the same requests with speculation and without, taking turns, in one engine.

Drafts come from the answers themselves, of which a share of tokens was replaced at random: rollouts of a policy that
agrees in that share of its tokens. Tokens and log-probs must be the same with them and without. What other processes do
to the machine shows in seconds, and hardly in the process's own, by one thread: OMP_NUM_THREADS=1.
"""

import random
import statistics
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from prompts import FreshPrompts
from works import KV_POOL_BYTES

from rollout_engine import LLM, RequestOutput, SamplingParams
from rollout_engine.core.draft_index import prompt_key
from rollout_engine.core.drafts import NUM_KEY_TOKENS


class Case(NamedTuple):
    """One work, and where its drafts come from."""

    num_prompts: int
    num_tokens: int
    drafts: str
    """"90 %", "0 %": answers with that share of right tokens; "none"."""

    frequency_penalty: float = 0.0

    def __str__(self) -> str:
        edits = f", frequency_penalty {self.frequency_penalty}" if self.frequency_penalty else ""
        return f"{self.num_prompts} x 64+{self.num_tokens}, drafts {self.drafts}{edits}"


CASES = {
    "L": [Case(1, 64, "90 %"), Case(1, 64, "0 %")],
    "M": [Case(4, 128, "90 %"), Case(4, 128, "0 %")],
    "S": [
        Case(64, 128, "0 %"),
        Case(64, 128, "90 %"),
        Case(8, 128, "0 %"),
        Case(64, 128, "none"),
        Case(4, 128, "90 %"),
        Case(4, 128, "90 %", frequency_penalty=0.1),
    ],
}


class Seconds(NamedTuple):
    """How long something took."""

    wall: float
    cpu: float
    """Of all threads of this process."""


class Engine:
    """One engine, with speculation and without: two engines differ by more, such as where their weights lie."""

    def __init__(self, directory: Path, dtype: str) -> None:
        options: dict[str, Any] = dict(dtype=dtype, load_format="dummy", skip_tokenizer_init=True, log_stats=False)
        self._llm = LLM(str(directory), kv_cache_bytes=KV_POOL_BYTES, speculation="auto", **options)
        self._core = self._llm.frontend.client.driver.core
        self._speculator = self._core._scheduler.speculator

    @property
    def stats(self) -> Any:
        """Of the core."""
        return self._core.stats

    def run(
        self, asked: list[list[int]], params: SamplingParams, *, drafts: bool
    ) -> tuple[list[RequestOutput], Seconds]:
        """Answers, and the time of their tokens: the KV of the prompts is known, which drafts do not speed up."""
        self._llm.reset_prefix_cache()
        self._llm.generate(asked, SamplingParams(max_tokens=1, speculation=False), use_tqdm=False)
        self._core._scheduler.speculator = self._speculator if drafts else None
        start = time.perf_counter(), time.process_time()
        answers = self._llm.generate(asked, params, use_tqdm=False)
        return answers, Seconds(time.perf_counter() - start[0], time.process_time() - start[1])

    def keep(self, answers: list[RequestOutput], share: float, rng: random.Random) -> None:
        """Keep the answers as rollouts to draft from, with this share of their tokens right."""
        index = self._speculator.index
        for answer in answers:
            prompt, tokens = answer.prompt_token_ids, answer.outputs[0].token_ids
            kept = [token if rng.random() < share else rng.randrange(3, 4096) for token in tokens]
            index.load(prompt_key(prompt), [array("I", prompt[-NUM_KEY_TOKENS:] + kept)])


def measure(engine: Engine, case: Case, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Seconds without / with, and what was drafted."""
    rng, ratios, cpu_ratios = random.Random(0), [], []
    before = _counts(engine.stats)
    num_steps = 0
    for number in range(rounds + 1):
        params = SamplingParams(
            max_tokens=case.num_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=1000 + number,
            frequency_penalty=case.frequency_penalty,
        )
        asked = prompts.draw(case.num_prompts, 64)
        if case.drafts != "none":
            answers, _ = engine.run(asked, params, drafts=False)
            engine.keep(answers, float(case.drafts.removesuffix(" %")) / 100, rng)
        seconds: dict[bool, Seconds] = {}
        for drafts in (True, False) if number % 2 else (False, True):
            steps = engine.stats.num_steps
            found, seconds[drafts] = engine.run(asked, params, drafts=drafts)
            if drafts:
                num_steps += engine.stats.num_steps - steps
            if case.drafts != "none":
                _require_equal(answers, found)
        if number:  # the first warms up
            ratios.append(seconds[False].wall / seconds[True].wall)
            cpu_ratios.append(seconds[False].cpu / seconds[True].cpu)
        else:
            before, num_steps = _counts(engine.stats), 0
    drafted, accepted = (now - then for now, then in zip(_counts(engine.stats), before, strict=True))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "accepted": round(accepted / max(drafted, 1), 3),
        "tokens_per_step": round(rounds * case.num_prompts * case.num_tokens / num_steps, 2),
    }


def _counts(stats: Any) -> tuple[int, int]:
    return sum(stats.drafts.num_drafted), sum(stats.drafts.num_accepted)


def _require_equal(plain: list[RequestOutput], drafted: list[RequestOutput]) -> None:
    for one, two in zip(plain, drafted, strict=True):
        a, b = one.outputs[0], two.outputs[0]
        if a.token_ids != b.token_ids or a.logprobs.tobytes() != b.logprobs.tobytes():
            raise AssertionError("speculation changed a token or a log-prob")
