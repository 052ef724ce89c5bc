"""Every face gives the same tokens over every client."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout_engine import (
    LLM,
    AsyncLLM,
    EvalTask,
    LifecycleError,
    RequestError,
    RolloutPolicy,
    RolloutService,
    SamplingParams,
)
from rollout_engine.fleet.run.client import FleetClient
from tests.conformance.clients import CLIENTS
from tests.conformance.running import plain, told_of_sample

PROMPTS = ["hello", [5, 6, 7], {"messages": [{"role": "user", "content": "hi"}]}]
PARAMS = SamplingParams(n=2, seed=5, max_tokens=12, logprobs=0)
NAMED = {
    "type": "object",
    "properties": {"is": {"enum": ["x", "y"]}},
    "required": ["is"],
    "additionalProperties": False,
}
FORMS = [{"json": NAMED}, {"regex": "[0-9]{3}(-[0-9]{2})+"}, {"choice": ["yes", "no"]}]


def samples_of(outputs):
    """Of every prompt, the samples."""
    return [[told_of_sample(sample) for sample in output.outputs] for output in outputs]


def told_of_batch(batch):
    return [plain(batch[key].numpy()) for key in (("tokens", "full"), ("log_probs", "full"), "seed", "group_id")]


@pytest.fixture
def expected(engine):
    """What `LLMEngine.step` brings."""
    ids = engine.add_requests(PROMPTS, PARAMS)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return samples_of(done[request_id] for request_id in ids)


def test_generate_gives_what_stepping_gives(engine, same, expected):
    llm = LLM.from_engine(engine)
    assert samples_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert samples_of(llm.chat(PROMPTS[2]["messages"], PARAMS, use_tqdm=False)) == expected[2:]
    if isinstance(engine.frontend.client, FleetClient):
        service = RolloutService(engine.frontend)
        assert samples_of(service.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert samples_of(asyncio.run(service.agenerate(PROMPTS, PARAMS))) == expected
    same(expected)


def test_threads_that_generate_at_once_get_what_each_gets_alone(engine, expected):
    llm = LLM.from_engine(engine)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(llm.generate, PROMPTS, PARAMS, use_tqdm=False) for _ in range(4)]
        assert [samples_of(run.result(60)) for run in runs] == [expected] * 4


@pytest.mark.quick(1)
def test_a_policy_rolls_out_what_stepping_gives(engine, same, expected):
    policy = RolloutPolicy(engine)
    batch = policy.rollout(PROMPTS, PARAMS, use_tqdm=False)
    assert batch["seed"].tolist() == [
        sample.seed if sample.seed < 2**63 else sample.seed - 2**64
        for output in LLM.from_engine(engine).generate(PROMPTS, PARAMS, use_tqdm=False)
        for sample in output.outputs
    ]
    assert plain(policy.score(batch).numpy()) == plain(batch["log_probs", "full"].numpy())

    async def groups():
        return [group async for group in policy.arollout(PROMPTS, PARAMS)]

    by_prompt = {int(group["group_id"][0]): group for group in asyncio.run(groups())}
    rewarded = policy.rollout(PROMPTS, PARAMS, use_tqdm=False, reward_fn=lambda completions: [1.0] * len(completions))
    assert told_of_batch(rewarded) == told_of_batch(batch)
    alone = [policy.rollout([prompt], PARAMS, use_tqdm=False) for prompt in PROMPTS]
    assert [told_of_batch(by_prompt[i])[:3] for i in range(3)] == [told_of_batch(group)[:3] for group in alone]
    same(told_of_batch(batch))


@pytest.mark.slow
def test_outputs_with_a_form_are_the_same_over_every_client(engine, same):
    params = [PARAMS.clone(max_tokens=40, structured_outputs=form) for form in FORMS]
    outputs = LLM.from_engine(engine).generate(["hello"] * len(FORMS), params, use_tqdm=False)
    assert {sample.text for sample in outputs[2].outputs} <= {"yes", "no"}
    with pytest.raises(RequestError, match="unclosed group"):
        engine.add_request("broken", "hello", PARAMS.clone(structured_outputs={"regex": "(a"}))
    same(samples_of(outputs))


def test_an_evaluation_samples_the_same_over_every_client(engine, same, tmp_path):
    settings = {"hot": {"max_tokens": 8}, "cool": {"max_tokens": 8, "temperature": 0.5}}
    task = EvalTask(name="short", rows=["one", "two"], reward_fn=lambda completions: [len(c) % 3 for c in completions])
    options = dict(sweep={"settings": settings}, num_samples=3, k=(1, 3), out=tmp_path / "out", use_tqdm=False)
    report = RolloutPolicy(engine).evaluate(task, **options)
    again = RolloutPolicy(engine).evaluate(task, **options)
    keys = "group_id", "sample_index", "seed", "response_token_ids", "log_probs", "reward"
    assert again.samples == report.samples
    same([[sample["evaluation"]["setting"], *(sample[key] for key in keys)] for sample in report.samples])


def test_no_face_waits_for_ever_while_paused(engine):
    engine.pause_generation()
    for verb, generate in (
        ("generate", lambda: LLM.from_engine(engine).generate("hello", PARAMS, use_tqdm=False)),
        ("rollout", lambda: RolloutPolicy(engine).rollout("hello", PARAMS, use_tqdm=False)),
    ):
        with pytest.raises(LifecycleError, match=f"{verb}: not possible while the engine is PAUSED"):
            generate()
    engine.resume_generation()


@pytest.mark.quick(1)
def test_the_asynchronous_face_gives_the_same(kind, config, engine, same, expected):
    """Over a client of its own; one that its caller turns is refused, since a loop has no thread to lend."""
    with CLIENTS[kind](config) as client:
        if kind == "turned by its caller":
            with pytest.raises(LifecycleError, match="own_thread=True"):
                AsyncLLM.from_client(client)
            return
        with AsyncLLM.from_client(client) as async_llm:
            assert asyncio.run(async_work(async_llm)) == expected
            over_both = [RolloutPolicy(face).rollout(PROMPTS, PARAMS, use_tqdm=False) for face in (async_llm, engine)]
            assert told_of_batch(over_both[0]) == told_of_batch(over_both[1])


async def async_work(engine):
    """Requests, one left in the middle, and verbs."""

    async def last(prompt, rank=None):
        return [output async for output in engine.generate(prompt, PARAMS, data_parallel_rank=rank)][-1]

    outputs = await asyncio.gather(*map(last, PROMPTS))
    assert samples_of([await last(PROMPTS[1], rank=0)]) == samples_of(outputs[1:2])
    with pytest.raises(RequestError, match="data_parallel_rank=9 is not allowed"):
        await last(PROMPTS[1], rank=9)
    assert "generate" in await engine.get_supported_tasks() and not await engine.is_tracing_enabled()
    async for _ in engine.generate("hello", SamplingParams(max_tokens=30_000, ignore_eos=True)):
        break
    await engine.wait_for_requests_to_drain(drain_timeout=60)
    await engine.pause_generation(mode="wait")
    assert await engine.is_paused()
    await engine.resume_generation()
    assert await engine.get_num_unfinished_requests() == 0
    return samples_of(outputs)
