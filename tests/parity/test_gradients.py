"""Gradients of whole models: as close to those of float64 as autograd of the plain module in float32 is.

The truth is the plain module with float64 weights, in which every cast to float32 is one to float64; rotary tables
stay as the float32 module has them. Log-probs of a few sequences are weighted and added up, and each of two float32
computations, the exact trainer's and the plain module's, is compared with the truth.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rollout_engine import exact
from rollout_engine.model.modules.routers import recording, routers_of
from rollout_engine.testing import tiny_model
from rollout_engine.testing.architectures import sizes_of

NAMES = (
    "llama qwen3_moe mixtral qwen2_moe deepseek_v2 deepseek_v3 deepseek_v3_eight_groups glm4_moe glm4_moe_lite "
    "minimax_m2 mimo_v2_flash hy_v3 gpt_oss gemma4_text gemma4_text_own_kv gemma4_text_experts ernie4_5_moe phimoe "
    "longcat_flash"
).split()
BATCHES = torch.randint(3, 259, (3, 2, 60), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(2, 59, generator=torch.Generator().manual_seed(1))
ALLOWED = 2
"""Times the distance of the plain module: in deep nets of random weights round-off grows by chance."""
pytestmark = [pytest.mark.usefixtures("own_products"), pytest.mark.slow]


class InFloat64(TorchFunctionMode):
    """Turns every cast to float32 into one to float64, outside of rotary embeddings."""

    def __init__(self, model):
        super().__init__()
        self._is_on = True
        for child in model.modules():
            if "Rotary" in type(child).__name__:
                child.register_forward_pre_hook(lambda *_: self._turn(on=False))
                child.register_forward_hook(lambda *_: self._turn(on=True))

    def _turn(self, *, on):
        self._is_on = on

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._is_on:
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return func(*args, **kwargs)


def plain(model):
    """A copy with transformers' own eager attention and experts."""
    made = copy.deepcopy(model)
    made.set_attn_implementation("eager")
    made.config._experts_implementation = "eager"
    return made


def logprobs(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def exact_logprobs(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return exact.logprobs_of(logits.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)


def gradients(model, values):
    """The gradient of each parameter, float64, of the weighted sum of `values` [B, T - 1]."""
    found = torch.autograd.grad((values * WEIGHTS).sum(), list(model.parameters()), allow_unused=True)
    return [None if each is None else each.double() for each in found]


def truth_of(model, ids):
    made = plain(model).double()
    with InFloat64(made):
        values = logprobs(made, ids)
        assert values.dtype == torch.float64
        return gradients(made, values)


def distance(found, truth):
    """Relative to the norm of `truth`, over all parameters together."""
    pairs = [(mine, right) for mine, right in zip(found, truth, strict=True) if right is not None]
    assert all(mine is not None for mine, _ in pairs)
    error = math.fsum(float((mine - right).square().sum()) for mine, right in pairs)
    return math.sqrt(error / math.fsum(float(right.square().sum()) for _, right in pairs))


def chosen_experts(model, forward):
    with recording(routers_of(model)) as chosen:
        values = forward()
    return values, [each.sort(-1).values for each in chosen]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_as_close_to_float64_as_the_plain_modules_are(name):
    architecture, sizes = sizes_of(name)
    model = tiny_model(architecture, **sizes).requires_grad_(True)
    theirs, ours, errors = plain(model), exact.enable(copy.deepcopy(model)), []
    for ids in BATCHES:
        truth = truth_of(model, ids)
        mine, our_experts = chosen_experts(ours, partial(exact_logprobs, ours, ids))
        values, their_experts = chosen_experts(theirs, partial(logprobs, theirs, ids))
        assert all(torch.equal(one, two) for one, two in zip(our_experts, their_experts, strict=True))
        errors.append([distance(gradients(ours, mine), truth), distance(gradients(theirs, values), truth)])
    of_ours, of_theirs = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    print(f"{name}: {of_ours:.2e} from float64, the plain module {of_theirs:.2e}")
    assert of_ours <= max(1e-6, ALLOWED * of_theirs)
