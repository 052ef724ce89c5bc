"""Deterministic mode beside an exact trainer of the same weights: the log-prob of every token, bit for bit."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, exact
from tests.benchmarks.gpu_engine import ENGINE
from tests.benchmarks.gpu_shapes import Requests, write_config

_TEMPERATURE = 0.6
_SEQUENCES = 8
"""Of a trainer's batch: their logits all exist."""


def exactness(name: str = "Qwen3-0.6B") -> dict[str, Any]:
    """Tokens of the field's small benchmark whose log-probs differ in any bit between engine and trainer."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory), name)
        config = AutoConfig.from_pretrained(path)
        llm = LLM(str(path), **(ENGINE | {"deterministic": True, "gpu_memory_utilization": 0.4}))
    trainer = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()
    trainer.load_state_dict(llm.llm_engine.apply_model(lambda module: module.state_dict())[0])
    return mismatches(llm, exact.enable(trainer), Requests.drawn())


def mismatches(llm: LLM, trainer: nn.Module, requests: Requests) -> dict[str, Any]:
    """Of what `llm` samples for `requests`: tokens, those whose log-probs differ from the trainer's, and seconds."""
    asked: Any = [
        SamplingParams(temperature=_TEMPERATURE, max_tokens=n, logprobs=0, ignore_eos=True, detokenize=False)
        for n in requests.num_sampled
    ]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in requests.prompts], asked, use_tqdm=False)
    generated = time.perf_counter()
    failed = [output.outputs[0].error for output in outputs if output.outputs[0].error]
    if failed:
        raise RuntimeError(failed[0])
    outputs.sort(key=lambda output: len(output.prompt_token_ids) + len(output.outputs[0].token_ids))
    differ = sum(_differ(trainer, outputs[i : i + _SEQUENCES]) for i in range(0, len(outputs), _SEQUENCES))
    return {
        "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "num_mismatches": differ,
        "engine_seconds": generated - started,
        "trainer_seconds": time.perf_counter() - generated,
    }


@torch.no_grad()
def _differ(trainer: nn.Module, outputs: Sequence[Any]) -> int:
    device = next(trainer.parameters()).device
    sequences = [torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids]) for output in outputs]
    ids = pad_sequence(sequences, batch_first=True).to(device)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(ids) for ids in sequences])[:, None]
    theirs = exact.token_logprobs(trainer, ids, mask.to(device), temperature=_TEMPERATURE).cpu().numpy()
    found = 0
    for row, output in zip(theirs, outputs, strict=True):
        mine = np.asarray(output.outputs[0].logprobs, np.float32)
        first = len(output.prompt_token_ids) - 1
        found += int((mine.view(np.int32) != row[first : first + len(mine)].view(np.int32)).sum())
    return found
