"""In a forked child every public method of every face raises at once, and so do iterators from before the fork."""

import asyncio
import inspect
import os
import threading

import pytest

from rollout_engine import LLM, AsyncLLM, BeamSearchParams, RolloutPolicy, RolloutService, SamplingParams
from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.fleet.run.client import FleetClient
from tests.conformance.running import ENDLESS, step_further, weights
from tests.conformance.scenarios import SCENARIOS
from tests.forking import in_fork

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

ARGUMENTS = {
    "add_request": ("r", "hello"),
    "add_requests": (["hello"],),
    "agenerate": ("hello",),
    "abort": ("endless",),
    "abort_request": ("endless",),
    "arollout": (["hello"],),
    "collect": (["hello"],),
    "beam_search": (["hello"], BeamSearchParams(beam_width=2, max_tokens=2)),
    "chat": ([{"role": "user", "content": "hello"}],),
    "distributions": ([5, 6], [1]),
    "encode": ("hello",),
    "evaluate": ({"rows": ["hello"], "reward_fn": len},),
    "generate": ("hello",),
    "get_sequence_ids": ("endless",),
    "is_unfinished": ("endless",),
    "reward": ("hello",),
    "rollout": (["hello"],),
    "scale": (2,),
    "score": ([[5]], [[6]]),
    "score_candidates": ([[5]], [[6]]),
    "update_weights": (weights(1),),
}
ELSEWHERE = {
    "create_load_balancer",
    "get_default_sampling_params",
    "get_master_port",
    "get_supported_tasks",
    "get_tokenizer",
    "get_tp_size",
    "init_weight_update_group",
    "is_tracing_enabled",
    "load_drafts",
    "save_drafts",
    "shutdown",
}
"""Methods that touch nothing of the engine, or do nothing there."""
MAKES = {"from_config", "from_client", "from_engine", "from_pretrained", "connect", "launch"}


def methods_of(face, batch):
    """Calls of every public method of a face, by name. `batch`: of a rollout."""
    for name in sorted(dir(type(face))):
        if name.startswith("_") or name in ELSEWHERE | MAKES or not callable(getattr(type(face), name)):
            continue
        arguments = ARGUMENTS.get(name, tuple(SCENARIOS[name].arguments.values()) if name in SCENARIOS else ())
        if isinstance(face, RolloutPolicy) and name in ("score", "add_picture_features"):
            arguments = (batch,)
        yield name, lambda name=name, arguments=arguments: getattr(face, name)(*arguments)


def to_its_end(call):
    """Run what a call returns, if that is a coroutine or an asynchronous generator."""
    result = call()
    if inspect.isasyncgen(result):
        asyncio.run(_drain(result))
    elif inspect.iscoroutine(result):
        asyncio.run(result)


async def _drain(generator):
    async for _ in generator:
        pass


def faces_of(engine):
    """Every face that can stand on the engine's client."""
    faces = [engine, LLM.from_engine(engine), RolloutPolicy(engine)]
    if isinstance(engine.frontend.client, FleetClient):
        faces.append(RolloutService(engine.frontend))
    return faces if engine.frontend.client.needs_turns else [*faces, AsyncLLM._standing_on(engine.frontend)]


def assert_refused(name, call):
    with pytest.raises(LifecycleError, match=f"belongs to process {os.getppid()}; this is process"):
        to_its_end(call)
        pytest.fail(f"{name} did not raise")


def test_every_method_of_every_face_raises_though_another_thread_held_every_lock(engine):
    batch = RolloutPolicy(engine).rollout(["hello"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    engine.add_request("endless", "hello", ENDLESS)
    step_further(engine)
    faces, taken, done = faces_of(engine), threading.Event(), threading.Event()

    def hold_locks():
        with engine.frontend._admitting, engine.frontend.streams._lock:
            taken.set()
            done.wait(60)

    def check():
        for face in faces:
            for name, call in methods_of(face, batch):
                assert_refused(f"{type(face).__name__}.{name}", call)

    holder = threading.Thread(target=hold_locks)
    holder.start()
    taken.wait(60)
    try:
        in_fork(check)
    finally:
        done.set()
        holder.join()
    step_further(engine)
    engine.abort_request("endless", discard=True)


def test_iterators_from_before_the_fork_raise(engine):
    if engine.frontend.client.needs_turns:
        pytest.skip("coroutines need an engine that computes by itself")
    face, loop = AsyncLLM._standing_on(engine.frontend), asyncio.new_event_loop()
    params = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False)
    iterators = [
        face.generate("hello", params),
        RolloutPolicy(face).arollout(["hello"] * 2, [SamplingParams(max_tokens=2, ignore_eos=True), ENDLESS]),
    ]
    for each in iterators:
        loop.run_until_complete(anext(each))

    def check():
        for each in iterators:
            with pytest.raises(LifecycleError, match=f"belongs to process {os.getppid()}; this is process"):
                asyncio.run(_drain(each))

    in_fork(check)
    loop.run_until_complete(anext(iterators[0]))
    for each in iterators:
        loop.run_until_complete(each.aclose())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_an_update_in_a_forked_child_leaves_the_parents_alone(engine):
    """What the parent keeps for its next update (shared memory, a directory) is not the child's to close."""
    engine.update_weights(weights(1))

    def check():
        assert_refused(
            "update_weights", lambda: engine.frontend.client.update_weights(weights(1), None, UpdateOptions())
        )

    in_fork(check)
    engine.update_weights(weights(0))
