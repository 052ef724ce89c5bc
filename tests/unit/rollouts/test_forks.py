"""A forked child that touches an engine gets an error at once, and takes nothing of its parent's."""

import asyncio
import threading
import weakref
from functools import partial

import pytest
import torch

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.llm import LLM
from sync.errors import SyncError
from sync.published import open_current
from sync.store import StoreSender
from tests.forking import in_fork

SHORT = SamplingParams(max_tokens=3)
MESSAGE = r"belongs to process \d+; this is process \d+, forked from it"


async def first_group(policy):
    return await anext(policy.arollout(["one"], SHORT))


TOUCHES = {
    "step": lambda rig: rig.engine.step(),
    "add_request": lambda rig: rig.engine.add_request("b", [5], SHORT),
    "abort_request": lambda rig: rig.engine.abort_request("a"),
    "generate": lambda rig: LLM.from_engine(rig.engine).generate([[5]], SHORT, use_tqdm=False),
    "rollout": lambda rig: rig.rollout(),
    "arollout": lambda rig: asyncio.run(first_group(rig.policy)),
    "score": lambda rig: rig.engine.score([[5]], [[6]]),
    "pause": lambda rig: rig.policy.pause_generation(),
    "sleep": lambda rig: rig.policy.sleep(),
    "update": lambda rig: rig.policy.update_weights({}),
    "is_paused": lambda rig: rig.policy.is_paused(),
    "metrics": lambda rig: rig.policy.get_metrics(),
    "rpc": lambda rig: rig.policy.collective_rpc("get_weight_norms"),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_error_at_once_even_while_a_step_runs(rig):
    """Another thread of the parent is inside a step, so its lock is taken in the child for ever."""
    begun, released = threading.Event(), threading.Event()

    def before_step():
        begun.set()
        released.wait()

    rig.executor.before_step = before_step
    thread = threading.Thread(target=rig.rollout)
    thread.start()
    begun.wait()

    def check():
        for name, touch in TOUCHES.items():
            with pytest.raises(LifecycleError, match=MESSAGE):
                touch(rig)
                pytest.fail(name)
        rig.policy.shutdown()

    in_fork(check)
    del rig.executor.before_step
    released.set()
    thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_end_of_a_forked_child_frees_nothing_of_its_parent(rig):
    def check(end):
        ended = []
        rig.executor.shutdown = lambda: ended.append("the executor")
        end()
        assert ended == []

    frontend = rig.engine.frontend
    assert isinstance(frontend.shutdown, weakref.finalize)  # so it also runs when the engine is garbage
    for end in (rig.policy.shutdown, frontend.shutdown, frontend.client.shutdown):
        in_fork(partial(check, end))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_reads_an_open_store_and_publishes_to_none(tmp_path):
    weights = {"w": torch.ones(3)}
    metadata = {"w": ("float32", (3,))}
    sender = StoreSender(tmp_path)
    sender.offer(weights, 1, metadata)
    with open_current(tmp_path) as published:

        def check():
            assert published.tensors["w"].tolist() == [1.0] * 3
            with pytest.raises(SyncError, match=f"The sender to .* {MESSAGE}"):
                sender.offer(weights, 2, metadata)

        in_fork(check)
    assert sender.offer({"w": torch.zeros(3)}, 2, metadata).version == 2
    sender.close()
