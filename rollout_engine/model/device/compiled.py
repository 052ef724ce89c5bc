"""The layers of a Hugging Face module by `torch.compile`, for modules that none of our kernels runs as a whole.

    a layer    norm ── q, k, v ── rotary ──┬── attention ──┬── out ── add, norm ── MLP ── add
                      compiled             │    opaque     │           compiled

One layer is compiled for all of its kind, which takes seconds; a whole forward takes minutes. Weights, and the number
of the layer, are inputs of what is compiled: values may be written in place, and nothing is compiled again.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, library, nn
from transformers import AttentionInterface

from rollout_engine.kernels.scoring import Scoring
from rollout_engine.model.attention import current_step, rollout_attention
from rollout_engine.model.decoder import NotOurs
from rollout_engine.model.layer_watch import layers_of

logger = logging.getLogger("rollout_engine")

_ATTENTION_NAME = "rollout_engine_compiled"


class CompiledLayers:
    """`module`: a twin of the one given, over the same weights, whose layers are compiled. It runs inside steps alone.

    Raises `NotOurs` where there is no list of `num_layers` layers.
    """

    def __init__(self, module: nn.Module, num_layers: int) -> None:
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.module = copy.deepcopy(module, shared)
        self.module.set_attn_implementation(_ATTENTION_NAME)
        layers = layers_of(self.module, num_layers)
        if not layers:
            raise NotOurs("it has no list of decoder layers")
        self._compiler = _Compiler()
        run = torch.compile(_own_copy(_run), dynamic=True, backend=self._compiler)
        for child in self.module.modules():
            if isinstance(getattr(child, "layer_idx", None), int):
                child.layer_idx = torch.tensor(child.layer_idx)  # a constant would be compiled for each layer anew
        for layer in layers:
            layer.forward = partial(run, layer)

    @property
    def num_graphs(self) -> int:
        """Compiled so far."""
        return self._compiler.num_graphs

    @contextmanager
    def compiling(self, seconds: float) -> Iterator[None]:
        """Only within it, and until `seconds` are over, steps wait for the compiler. Then it raises `TimeoutError`."""
        self._compiler.end = time.monotonic() + seconds
        try:
            with torch._dynamo.config.patch(specialize_float=True):  # scales and epsilons are constants
                yield
        finally:
            self._compiler.end = None


class _Compiler:
    """A backend of `torch.compile`: Inductor, while there is time."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.end: float | None = None
        """By the monotonic clock; None: what is new runs uncompiled."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.end is None:
            logger.warning("A step is of a kind that was not compiled at the start: it runs uncompiled.")
            return graph.forward
        if time.monotonic() > self.end:
            raise TimeoutError(f"{self.num_graphs} graphs took all the time there was")
        compiled = _inductor(graph, inputs)
        self.num_graphs += 1
        return compiled


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Weights will change, so nothing is frozen; and nobody would end processes that compile."""
    from torch._inductor import config  # a second to import, for those who compile

    inductor: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")
    with config.patch(freezing=False, compile_threads=1):
        compiled: Callable[..., Any] = inductor(graph, inputs)
    return compiled


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled is kept, and counted against a limit, by code object: engines must not share one."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@library.custom_op("rollout_engine::attend", mutates_args=())
def _attend(
    layer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """As `AttentionStep.attend`, by the step that this thread is in. `layer` int64 [], on the host."""
    step = current_step()
    assert step is not None, "compiled layers run inside steps"
    return step.attend(int(layer), q, k, v, Scoring(scale, sliding_window, softcap), sinks)


@_attend.register_fake
def _(layer: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


class _OpaqueStep:
    """Satisfies `attention.AttentionStep`, but for the number of the layer."""

    def attend(
        self, layer: Tensor, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        return _attend(layer, q, k, v, scoring.scale, scoring.sliding_window, scoring.softcap, sinks)


AttentionInterface.register(_ATTENTION_NAME, partial(rollout_attention, step=_OpaqueStep()))
