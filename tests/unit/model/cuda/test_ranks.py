"""A model cut over ranks with devices says what one device says, to the bit where products are deterministic."""

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.execution import process_executor, rank_team, worker
from rollout_engine.kernels.cpu import turns
from rollout_engine.model import backends
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.testing import tiny_model
from tests.unit.model.cuda.conftest import OPTIONS

pytestmark = [
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on devices are tested in test_gpu.py there"),
]
PROMPTS = [[7, 8, 9], list(range(40, 62))]
DRAWN = SamplingParams(temperature=0.8, top_k=20, max_tokens=3, logprobs=1, n=2, seed=3, ignore_eos=True)


@pytest.fixture
def ranks_on_device(monkeypatch, checkpoints):
    """A function from a number of ranks and options to an `LLM` on as many devices; shut down in the end."""
    made = []
    device = backends.Device(torch.device("cpu"), CudaBackend)
    for module in (process_executor, worker):
        monkeypatch.setattr(module, "device_of", lambda config: device)
    monkeypatch.setattr(rank_team, "_MODULE", "tests.unit.model.cuda.rank_on_interpreter")

    def get(num_ranks, architecture="qwen3", **options):
        options = OPTIONS | {"num_threads": 1, "tensor_parallel_size": num_ranks} | options
        made.append(LLM(str(checkpoints(architecture)), **options))
        return made[-1]

    yield get
    for each in made:
        each.shutdown()


def said(llm):
    """Bits of all that an engine says to requests, and of scores."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], DRAWN, use_tqdm=False)
    found = [(list(c.token_ids), c.logprobs.tobytes()) for output in outputs for c in output.outputs]
    return found, [np.asarray(each).tobytes() for each in llm.score([[5, 9, 2], [7]], [[4, 5], [8]])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_devices_say_what_one_says_before_and_after_an_update(ranks_on_device, dtype):
    one, two = (ranks_on_device(n, dtype=dtype, deterministic=True) for n in (1, 2))
    assert two.frontend.client.driver.executor.worker.runner.model.decoder is not None
    assert said(two) == said(one)
    source = tiny_model("qwen3", seed=5)
    assert two.update_weights(source).digest == one.update_weights(source).digest
    assert said(two) == said(one)
