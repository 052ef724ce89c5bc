"""Code of the user's that does not return: its request or call fails, or the core ends and says why."""

import asyncio

import pytest

from rollout_engine import LLM, AsyncLLM, EngineDeadError, SamplingParams, StepDeadlineError
from rollout_engine.cli.schedule_replay import replay
from rollout_engine.process.post_mortem import CallLine, EndLine, StepLine, read_post_mortem
from tests.faults.deaths import ENDLESS, OPTIONS

CODE = dict(
    logits_processors=["tests.faults.stuck_code:Stuck"], worker_extensions=["tests.faults.stuck_code:StuckExtension"]
)
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
PROCESSOR = r"logits processor tests.faults.stuck_code:Stuck \(apply, sequence \d+\)"


@pytest.mark.slow
def test_a_core_lives_on_where_it_can_interrupt_and_ends_with_the_reason_where_it_cannot(checkpoint, post_mortems):
    async def last_of(engine, params, prompt=(5, 6)):
        async for output in engine.generate(list(prompt), params):
            last = output
        return last.outputs[0]

    async def run(engine):
        alone = await last_of(engine, PARAMS)
        stuck, beside = await asyncio.gather(
            last_of(engine, PARAMS.clone(extra_args={"stuck": "loops"}), prompt=[7]), last_of(engine, PARAMS)
        )
        assert stuck.finish_reason == "error" and len(stuck.token_ids) == 3
        assert "StepDeadlineError: logits processor tests.faults.stuck_code:Stuck (apply, sequence" in stuck.error
        assert beside.token_ids == alone.token_ids
        with pytest.raises(StepDeadlineError, match="^method 'loop' of worker extension tests.faults.stuck_code:Stuck"):
            await engine.collective_rpc("loop")
        assert (await last_of(engine, PARAMS)).token_ids == alone.token_ids
        doomed = [asyncio.create_task(last_of(engine, ENDLESS, prompt=[8]))]
        doomed.append(asyncio.create_task(last_of(engine, PARAMS.clone(extra_args={"stuck": "waits"}), prompt=[7])))
        for error in await asyncio.gather(*doomed, return_exceptions=True):
            with pytest.raises(EngineDeadError, match=rf"is gone: {PROCESSOR}, in a step, has not ended within"):
                raise error

    with AsyncLLM(checkpoint, **OPTIONS, **CODE) as engine:
        asyncio.run(run(engine))
        (path,) = post_mortems.iterdir()
        assert f"(see `rollout-engine postmortem {path}`)" in str(engine.dead_error)
    header, *lines = read_post_mortem(path)
    assert header.is_whole and header.reason.startswith("logits processor tests.faults.stuck_code:Stuck")
    assert [line.name for line in lines if isinstance(line, CallLine) and line.is_verb] == ["loop"]
    last = [line for line in lines if isinstance(line, StepLine | EndLine)][-1]
    assert isinstance(last, StepLine), "the last step did not end"
    assert len(last.samples) == 2
    assert replay([header, *lines]).failure == ""


def test_in_process_a_loop_is_interrupted_too(checkpoint):
    llm = LLM(str(checkpoint), **OPTIONS, **CODE)
    try:
        stuck, beside = llm.generate(
            [[7], [5, 6]], [PARAMS.clone(extra_args={"stuck": "loops"}), PARAMS], use_tqdm=False
        )
        assert "StepDeadlineError" in stuck.outputs[0].error and beside.outputs[0].finish_reason == "length"
        with pytest.raises(StepDeadlineError):
            llm.collective_rpc("loop")
        assert llm.generate([[5, 6]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == beside.outputs[0].token_ids
    finally:
        llm.shutdown()
