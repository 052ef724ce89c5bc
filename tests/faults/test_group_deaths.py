"""Engines that divide experts are killed at any moment: their requests end, with the tokens of one engine."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest

from rollout_engine import LLM, RolloutService, SamplingParams
from rollout_engine.base.errors import RolloutEngineError
from rollout_engine.kernels.cpu import phases
from rollout_engine.testing import tiny_checkpoint, tiny_model

pytestmark = pytest.mark.skipif(not phases.is_available(), reason="no C++ compiler here")
OPTIONS = dict(skip_tokenizer_init=True, num_kv_blocks=128, log_stats=False, num_threads=1)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 9, 17, 3)]
PARAMS = SamplingParams(max_tokens=400, logprobs=0, seed=5, ignore_eos=True)
SECONDS = 180.0


def samples_of(engine):
    results = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(list(c.token_ids), c.logprobs.tobytes()) for result in results for c in result.outputs]


def serve_again(service):
    """Wait until both engines serve."""
    end = time.monotonic() + SECONDS
    while [each.state for each in service.health()] != ["SYNCED"] * 2:
        assert time.monotonic() < end, service.health()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_requests_end_whichever_engine_dies_and_whatever_it_does(tmp_path, seed):
    chance = random.Random(f"deaths {seed}")
    path, new = tiny_checkpoint(tmp_path, "qwen3_moe"), tiny_model("qwen3_moe", seed=3)
    with LLM(str(path), **OPTIONS) as llm:
        llm.update_weights(new)
        expected = samples_of(llm)
    with RolloutService.from_pretrained(str(path), data_parallel_size=2, **OPTIONS) as service:
        service.update_weights(new)
        for _ in range(4):
            found = []
            generate = threading.Thread(target=lambda found=found: found.extend(samples_of(service)))
            generate.start()
            while service.get_num_unfinished_requests() < len(PROMPTS):
                time.sleep(0.01)
            work = threading.Thread(target=disturb, args=(service, new, chance.choice(["update", "score", "nothing"])))
            work.start()
            for _ in range(chance.choice([1, 1, 2])):
                time.sleep(chance.uniform(0.0, 0.5))
                for pid in [each.pid for each in service.health() if each.pid][: chance.choice([1, 2])]:
                    with suppress(ProcessLookupError):  # it has ended with the other one
                        os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]))
            work.join(SECONDS)
            generate.join(SECONDS)
            assert not (work.is_alive() or generate.is_alive()), service.health()
            assert found == expected
            serve_again(service)


def disturb(service, source, kind):
    """Have the engines do something that a death may break off."""
    try:
        if kind == "update":
            service.update_weights(source, kv="recompute")
        elif kind == "score":
            service.score([[3, 4, 5]] * 50, [[6, 7]] * 50)
    except RolloutEngineError as problem:
        print(f"{kind}: {type(problem).__name__}: {problem}")
