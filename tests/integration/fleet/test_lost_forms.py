"""Requests with a form whose replica is killed go on at another one, which finds where each stands in its grammar."""

import asyncio
import os
import signal

import pytest

from rollout_engine import LLM, AsyncLLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint
from tests.faults.replica_deaths import all_serve, said

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, log_stats=False)
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
FORMS = [
    {"regex": "([a-e]{3}-[0-9]{2},)*[a-e]{3}-[0-9]{2}"},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 40} | COMPACT},
    {"grammar": 'start: "(" start ")" start | "x"'},
] * 4
PARAMS = [
    SamplingParams(n=2, seed=i, max_tokens=300, logprobs=0, structured_outputs=form) for i, form in enumerate(FORMS)
]


@pytest.mark.slow
def test_a_killed_replica_changes_no_token_of_any_form(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path, max_position_embeddings=4096)
    with LLM(checkpoint, **OPTIONS) as alone:
        expected = [said(output.outputs) for output in alone.generate(["hello"] * len(FORMS), PARAMS, use_tqdm=False)]
    num_outputs = num_continued = 0

    async def run(engine):
        replicas = await all_serve(engine)

        async def read(params):
            nonlocal num_outputs, num_continued
            output = None
            async for output in engine.generate("hello", params):  # noqa: B007
                num_outputs += 1
                if num_outputs == 200:
                    entries = engine.frontend.client._brain.ledger.of_replica(1)
                    num_continued += sum(len(entry.live) for entry in entries)
                    os.kill(replicas[1].pid, signal.SIGKILL)
            return said(output.outputs)

        return await asyncio.gather(*map(read, PARAMS))

    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:
        assert asyncio.run(run(engine)) == expected
    assert num_continued > 0
