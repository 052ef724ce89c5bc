"""Runs the layers of a Hugging Face module by `torch.compile`, for modules that the fused decoder cannot run.

    a layer    norm ── q, k, v ── rotary ──┬── attention ──┬── out ── add, norm ── MLP ── add
                      compiled             │    opaque     │           compiled

One layer is compiled for all of its kind, which takes seconds; a whole forward would take minutes. Weights and the
layer index are inputs of the compiled code, so weights may be written in place without compiling again.
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
from transformers import AttentionInterface, PreTrainedModel

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.model.modules.attention_interface import current_step, rollout_attention
from rollout_engine.model.modules.decoder_structure import UnsupportedStructure
from rollout_engine.model.modules.layer_watch import layers_of

logger = logging.getLogger("rollout_engine")

_ATTENTION_NAME = "rollout_engine_compiled"


class CompiledLayers:
    """`module` is a copy of the given one over the same weights, with compiled layers; call it inside steps only.

    Raises `UnsupportedStructure` where there is no list of `num_layers` layers.
    """

    def __init__(self, module: PreTrainedModel, num_layers: int) -> None:
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.module = copy.deepcopy(module, shared)
        self.module.set_attn_implementation(_ATTENTION_NAME)
        layers = layers_of(self.module, num_layers)
        if not layers:
            raise UnsupportedStructure("it has no list of decoder layers")
        self._compiler = _Compiler()
        run = torch.compile(_own_copy(_run), dynamic=True, backend=self._compiler)
        for child in self.module.modules():
            if isinstance(getattr(child, "layer_idx", None), int):
                child.layer_idx = torch.tensor(child.layer_idx)  # a constant would compile every layer anew
        for layer in layers:
            layer.forward = partial(run, layer)

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far."""
        return self._compiler.num_graphs

    @contextmanager
    def compiling(self, seconds: float) -> Iterator[None]:
        """Compile what steps inside need; raises `TimeoutError` after `seconds`. Outside, nothing new is compiled."""
        self._compiler.end = time.monotonic() + seconds
        try:
            with torch._dynamo.config.patch(specialize_float=True):  # scales and epsilons are constants
                yield
        finally:
            self._compiler.end = None


class _Compiler:
    """A backend of `torch.compile`: Inductor until `end`, nothing after it."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.end: float | None = None
        """On the monotonic clock; None: new graphs run uncompiled."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.end is None:
            logger.warning("This step needs a graph that was not compiled at start-up: it runs uncompiled.")
            return graph.forward
        if time.monotonic() > self.end:
            raise TimeoutError(f"{self.num_graphs} graphs took all the time allowed")
        compiled = _inductor(graph, inputs)
        self.num_graphs += 1
        return compiled


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile without freezing, because weights change, and in this process, because nobody would end others."""
    from torch._inductor import config  # takes a second to import

    inductor: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")
    with config.patch(freezing=False, compile_threads=1):
        compiled: Callable[..., Any] = inductor(graph, inputs)
    return compiled


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object, by which torch keeps and limits compiled code: engines must not share one."""
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
    """`AttentionStep.attend` of this thread's step, opaque to the compiler. `layer` int64 [], on the host."""
    step = current_step()
    assert step is not None, "compiled layers run inside steps"
    return step.attend(int(layer), q, k, v, AttentionParams(scale, sliding_window, softcap), sinks)


@_attend.register_fake
def _(layer: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


class _OpaqueStep:
    """An `AttentionStep` whose `layer` is a tensor."""

    def attend(
        self, layer: Tensor, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None
    ) -> Tensor:
        out: Tensor = _attend(layer, q, k, v, params.scale, params.sliding_window, params.softcap, sinks)
        return out


AttentionInterface.register(_ATTENTION_NAME, partial(rollout_attention, step=_OpaqueStep()))  # type: ignore[arg-type]
