"""Prompts with pictures to engines in other processes: the bits of one in this, and each picture crosses once."""

import asyncio
import os
import signal

import pytest

from rollout_engine import LLM, AsyncLLM, LLMEngine, SamplingParams
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.process.process_client import ProcessClient
from rollout_engine.testing.tiny_pictures import FAMILIES, random_picture, tiny_vision_checkpoint
from tests.faults.replica_deaths import all_serve, said

FAMILY = "qwen3_vl"
OPTIONS = dict(num_kv_blocks=512, max_num_seqs=64, max_model_len=512, num_threads=1, log_stats=False)
SHOWN = FAMILIES[FAMILY].picture


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("model"), FAMILY)


def prompts_of(count, *pictures):
    """Prompts with the same pictures between different texts."""
    shown = " and ".join([SHOWN] * len(pictures))
    texts = [f"{shown} is all that is to be seen here: {i}" for i in range(count)]
    return [{"prompt": text, "multi_modal_data": {"image": list(pictures)}} for text in texts]


def found_by(engine, prompts, **params):
    params = SamplingParams(**(dict(max_tokens=2, seed=3, logprobs=0, ignore_eos=True) | params))
    outputs = LLM.from_engine(engine).generate(prompts, params, use_tqdm=False)
    return [said(output.outputs) for output in outputs]


def test_a_picture_that_64_requests_share_crosses_once_and_changes_no_bit(checkpoint):
    one, two = random_picture(1, 40, 32), random_picture(2, 24, 36)
    prompts = prompts_of(64, one) + prompts_of(2, two, one)
    with LLM(checkpoint, **OPTIONS) as llm:
        engine = llm.llm_engine
        expected = found_by(engine, prompts)
        assert engine.stats.pictures.num_received == 0
        assert engine.stats.pictures.num_encoded == 2
        engine.reset_encoder_cache()
        assert found_by(engine, prompts[:2]) == expected[:2] and engine.stats.pictures.num_encoded == 2, "KV is known"
        engine.reset_prefix_cache()
        assert found_by(engine, prompts[:2]) == expected[:2] and engine.stats.pictures.num_encoded == 3
        config = engine.frontend.client.info.config
    with LLMEngine.from_client(ProcessClient.start(config)) as engine:
        assert found_by(engine, prompts) == expected
        stats = engine.stats.pictures
        assert (stats.num_received, stats.num_hits, stats.num_encoded) == (2, 63 + 3, 2)
        engine.reset_mm_cache()
        engine.reset_prefix_cache()
        assert found_by(engine, prompts_of(2, two, one)) == expected[64:]
        stats = engine.stats.pictures
        assert (stats.num_received, stats.num_hits, stats.num_encoded) == (4, 66 + 2, 2)


def test_pictures_that_do_not_fit_their_prompt_end_its_request_alone(checkpoint):
    params = SamplingParams(max_tokens=3, seed=3, logprobs=0, ignore_eos=True)
    with LLM(checkpoint, **OPTIONS) as llm:
        [good] = prompts_of(1, random_picture(1, 40, 32))
        (alone,) = llm.generate([good], params, use_tqdm=False)
        llm.reset_prefix_cache()
        ids, [placed] = alone.prompt_token_ids, alone.pictures
        longer = PlacedPicture(placed.start, placed.end + 1, placed.picture)
        without_grid = Picture.of({"pixel_values": placed.picture.arrays["pixel_values"]})
        bad = [
            {"prompt_token_ids": [*ids[: placed.end], ids[placed.start], *ids[placed.end :]], "pictures": [longer]},
            {"prompt_token_ids": ids, "pictures": [PlacedPicture(placed.start, placed.end, without_grid)]},
        ]
        found = llm.generate([good, bad[0], good, bad[1]], params, use_tqdm=False)
        assert said(found[0].outputs) == said(found[2].outputs) == said(alone.outputs)
        for each in (found[1].outputs[0], found[3].outputs[0]):
            assert each.finish_reason == "error" and "its pictures cannot be computed" in each.error
        llm.check_integrity()


@pytest.mark.slow
def test_a_killed_replica_changes_no_token_of_prompts_with_pictures(checkpoint):
    prompts = prompts_of(8, random_picture(1, 40, 32), random_picture(2, 24, 36))
    with LLM(checkpoint, **OPTIONS) as alone:
        expected = found_by(alone.llm_engine, prompts, n=2, max_tokens=150)
    params = SamplingParams(n=2, max_tokens=150, seed=3, logprobs=0, ignore_eos=True)
    num_outputs = num_continued = 0

    async def run(engine):
        replicas = await all_serve(engine)

        async def read(prompt):
            nonlocal num_outputs, num_continued
            output = None
            async for output in engine.generate(prompt, params):  # noqa: B007
                num_outputs += 1
                if num_outputs == 100:
                    entries = [engine.frontend.client._brain.ledger.of_replica(index) for index in range(2)]
                    busiest = int(len(entries[1]) > len(entries[0]))  # prompts that begin alike may all be at one
                    num_continued += sum(len(entry.live) for entry in entries[busiest])
                    os.kill(replicas[busiest].pid, signal.SIGKILL)
            return said(output.outputs)

        return await asyncio.gather(*map(read, prompts))

    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:
        assert asyncio.run(run(engine)) == expected
        metrics = asyncio.run(engine.get_metrics())
        assert metrics.core.counters.pictures.num_received <= 4
    assert num_continued > 0
