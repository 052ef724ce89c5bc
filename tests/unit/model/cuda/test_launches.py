"""What the host starts on the device for a step, beside the replay of its graph."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from rollout_engine import SamplingParams
from tests.unit.model.cuda.test_engine import graphs_by, runner_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what Triton's interpreter runs")
NOTHING_STARTED = {"empty", "detach", "slice", "split", "split_with_sizes", "select", "view", "t", "alias", "unbind"}
"""Operators that look at memory in another way, or ask for some."""


class Counted(TorchDispatchMode):
    """Names of operators and kernels outside replays, in order."""

    def __init__(self):
        super().__init__()
        self.names, self._is_inside = [], False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, result = operator.overloadpacket.__name__, operator(*args, **(kwargs or {}))
        did_nothing = name in NOTHING_STARTED or (args and result is args[0] and not name.endswith("_"))
        if not self._is_inside and not did_nothing:
            self.names.append(name)
        return result

    @contextmanager
    def one(self, name):
        """All within counts as this."""
        outermost = not self._is_inside
        if outermost:
            self.names.append(name)
            self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = self._is_inside and not outermost


@pytest.fixture
def steps(engine_on, monkeypatch):
    """A function from params to the names of what each step of two sequences started, those that a graph ran."""

    def count(params):
        llm, found, current = engine_on("device"), [], []
        launch = interpreter.GridExecutor.__call__

        def launched(self, *args, **kwargs):
            with current[-1].one(self.fn.__name__):
                return launch(self, *args, **kwargs)

        class Replay:
            def __init__(self, compute):
                self._compute = compute

            def replay(self):
                with current[-1].one("replay"):
                    return self._compute()

        runner = runner_of(llm)
        submit = runner.submit

        def submitted(work):
            current.append(Counted())
            with current[-1]:
                result = submit(work)
            found.append(current[-1].names)
            return result

        with monkeypatch.context() as patch, graphs_by(Replay, runner, sizes=[2]):
            runner.graphs.capture_all()
            patch.setattr(interpreter.GridExecutor, "__call__", launched)
            patch.setattr(runner, "submit", submitted)
            llm.generate([{"prompt_token_ids": [7, 8, i]} for i in (1, 2)], params, use_tqdm=False)
        return [names for names in found if "replay" in names]

    return count


@pytest.mark.slow
def test_a_step_is_one_upload_one_launch_one_replay_and_one_download(steps):
    made = steps(SamplingParams(max_tokens=5, logprobs=0, seed=1, ignore_eos=True))
    assert made and all(names == ["copy_", "_prepare_kernel", "replay", "clone"] for names in made)


@pytest.mark.slow
def test_truncation_is_three_launches_more_and_edits_are_an_upload_and_five(steps):
    (names, *others) = steps(SamplingParams(max_tokens=4, logprobs=0, seed=1, ignore_eos=True, top_p=0.9))
    assert names[3:-1] == ["_active_kernel", "_edge_kernel", "_outcome_kernel"]
    assert all(each == names for each in others)
    (names, *others) = steps(SamplingParams(max_tokens=4, logprobs=0, seed=1, ignore_eos=True, presence_penalty=1.0))
    edits = ["_copy_edited_kernel", "_edit_kernel", "_chunk_kernel", "_row_kernel", "_edited_outcome_kernel"]
    assert names[3:-1] == edits
    assert all(each == names for each in others)
