"""Measures the upper limits that memory and arithmetic of this machine set for one work on one model.

A rollout cannot be faster than its matrix products alone, nor than reading its weights and its KV once a step. Both
rates are measured now, on products of the model's own shapes, each layer's weights apart, and on a read larger than
any cache.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels import linear
from rollout_engine.model.loading.loader import find_geometry
from rollout_engine.model.modules.geometry import LayerGeometry

_READ_BYTES = 1 << 30
_PREFILL_ROWS = 512


class Work(NamedTuple):
    """Size of a rollout: prompts, samples per prompt, tokens per prompt and tokens per sample."""

    num_prompts: int
    num_samples: int
    num_prompt_tokens: int
    num_sampled_tokens: int

    @property
    def num_sequences(self) -> int:
        """Number of sequences: the rows of a decode step."""
        return self.num_prompts * self.num_samples

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, over all sequences."""
        return self.num_sequences * self.num_sampled_tokens

    def __str__(self) -> str:
        return f"{self.num_prompts}x{self.num_samples}, {self.num_prompt_tokens}+{self.num_sampled_tokens}"


class Experts(NamedTuple):
    """The experts of one layer, to which tokens are thought to be sent at random."""

    num_experts: int
    top_k: int
    """Number of experts that a token is sent to."""
    products: tuple[tuple[int, int], ...]
    """(out, in) features of one expert's products: gate/up together, then down."""

    def num_active(self, rows: int) -> float:
        """Expected number of distinct experts that a step of this many tokens reads."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)


class Dimensions(NamedTuple):
    """Shapes of a decoder's products and sizes of its reads per step. A product is (out, in) features."""

    layers: list[tuple[int, int]]
    """Products of all layers but those of experts: of attention, then gate/up together and down, or the router of the
    experts and the one that all tokens share."""
    head: tuple[int, int]
    kv_bytes_per_token: int
    """Bytes that a step reads and the KV pool holds of each token: keys and values, or latents, of the layers that have
    their own."""
    dtype: torch.dtype
    experts: Experts | None
    """The experts of each layer that has some; None in a dense model."""
    num_expert_layers: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig, geometry: Sequence[LayerGeometry], dtype: torch.dtype) -> "Dimensions":
        """Read a config with the field names of Llama, Mixtral, Qwen2, Qwen3, DeepSeek and similar models.

        Raises `ConfigError` for layers that keep states: their products have other shapes.
        """
        if not all(layer.attends and layer.state is None for layer in geometry):
            raise ConfigError(f"Limits are not known of {config.model_type}, which has layers that keep states.")
        hidden, mlp = config.hidden_size, config.intermediate_size
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        num_experts = next((count for name in names if (count := getattr(config, name, None))), 0)
        dense, inner = _mlp(hidden, mlp), _mlp(hidden, getattr(config, "moe_intermediate_size", None) or mlp)
        num_dense = getattr(config, "first_k_dense_replace", 0) if num_experts else len(geometry)
        shared = _mlp(hidden, inner[1][1] * (getattr(config, "n_shared_experts", None) or 0))
        layers: list[tuple[int, int]] = []
        for index, layer in enumerate(geometry):
            layers += _attention_products(config, layer)
            routed = [(num_experts, hidden), *(shared if math.prod(shared[0]) else ())]
            layers += dense if index < num_dense else routed
        return cls(
            layers=layers,
            head=(config.vocab_size, hidden),
            kv_bytes_per_token=sum(layer.cached_per_token for layer in geometry) * dtype.itemsize,
            dtype=dtype,
            experts=Experts(num_experts, config.num_experts_per_tok, inner) if num_experts else None,
            num_expert_layers=len(geometry) - num_dense,
        )


def _mlp(hidden: int, inner: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The products of an MLP: gate/up together, then down."""
    return (2 * inner, hidden), (hidden, inner)


def _attention_products(config: PretrainedConfig, layer: LayerGeometry) -> list[tuple[int, int]]:
    """The products around one layer's attention: q/k/v together and output; of latents those of each head too.

    A layer that reads another one's keys and values makes none.
    """
    hidden, heads = config.hidden_size, layer.num_heads
    if not layer.has_latents:
        cached = 0 if layer.kv_layer is not None else layer.num_kv_heads * (layer.head_dim_k + layer.head_dim_v)
        return [(heads * layer.head_dim_k + cached, hidden), (hidden, heads * layer.head_dim_v)]
    rank, nope, value = layer.head_dim_v, config.qk_nope_head_dim, config.v_head_dim
    num_queries, low = heads * (nope + layer.head_dim_k - rank), getattr(config, "q_lora_rank", None)
    queries = [(low, hidden), (num_queries, low)] if low else [(num_queries, hidden)]
    by_head = [(rank, nope), (value, rank)] * heads
    if layer.index_dim:
        queries += [(config.index_n_heads * layer.index_dim, low), (layer.index_dim + config.index_n_heads, hidden)]
    return [*queries, (layer.head_dim_k, hidden), *by_head, (hidden, heads * value)]


class Ceilings(NamedTuple):
    """Measured rates, and the tokens per second that each alone would allow."""

    read_gb_per_s: float
    gemm_gflop_per_s: float
    """At as many rows as the work has sequences."""
    tokens_per_second_by_reading: float
    tokens_per_second_by_gemm: float

    def shares(self, tokens_per_second: float) -> dict[str, float]:
        """The fraction of each limit that `tokens_per_second` reaches."""
        return {
            "share_of_reading": round(tokens_per_second / self.tokens_per_second_by_reading, 3),
            "share_of_gemm": round(tokens_per_second / self.tokens_per_second_by_gemm, 3),
        }


def dimensions_of(model: str, dtype: torch.dtype) -> Dimensions:
    """The shapes of a checkpoint: directory, GGUF file or hub id. Raises `ConfigError` for those that are not known."""
    return Dimensions.of(*find_geometry(model, dtype), dtype)


def measure(model: str, dtype: torch.dtype, work: Work) -> Ceilings:
    """Measure the limits of `work` on a checkpoint (directory or hub id) in `dtype`, with torch's current threads."""
    dims = dimensions_of(model, dtype)
    num_steps = max(work.num_sampled_tokens - 1, 1)  # the prompt's own step samples the first token
    bandwidth = read_bandwidth()
    rows = work.num_sequences
    step_seconds = products_seconds([*dims.layers, dims.head], rows, dtype) + _experts_seconds(dims, rows)
    prompt_tokens = work.num_prompts * work.num_prompt_tokens
    prompt_rows = min(prompt_tokens, _PREFILL_ROWS)
    prompt_seconds = products_seconds(dims.layers, prompt_rows, dtype) + _experts_seconds(dims, prompt_rows)
    prompt_seconds *= prompt_tokens / prompt_rows
    read_seconds = num_steps * _bytes_per_step(dims, work) / bandwidth
    return Ceilings(
        read_gb_per_s=round(bandwidth / 1e9, 1),
        gemm_gflop_per_s=round(_flops(dims, rows) / step_seconds / 1e9, 1),
        tokens_per_second_by_reading=round(work.num_tokens / read_seconds, 1),
        tokens_per_second_by_gemm=round(work.num_tokens / (prompt_seconds + num_steps * step_seconds), 1),
    )


def read_bandwidth() -> float:
    """Bytes per second read by a sum over more memory than the caches hold."""
    num_bytes = min(_READ_BYTES, psutil.virtual_memory().available // 4)
    data = torch.ones(num_bytes // 4)
    return data.nbytes / _best_of(5, data.sum)


@torch.inference_mode()
def products_seconds(shapes: list[tuple[int, int]], rows: int, dtype: torch.dtype) -> float:
    """Seconds for one product of `rows` rows with each of `shapes`, every weight packed separately.

    Computed by oneDNN or by the engine's own kernel, whichever is faster.
    """
    weights = {shape: torch.randn(shape).to(dtype) for shape in set(shapes)}
    inputs = {shape: torch.randn(rows, shape[1]).to(dtype) for shape in set(shapes)}
    return min(_pass_seconds(product, shapes, weights, inputs) for product in (_Engine, _OneDNN))


def _experts_seconds(dims: Dimensions, rows: int) -> float:
    """Seconds for the products of all layers' experts, of which a part is measured if they are large."""
    experts = dims.experts
    if experts is None:
        return 0.0
    num_active = experts.num_active(rows) * dims.num_expert_layers
    expert_bytes = sum(map(math.prod, experts.products)) * dims.dtype.itemsize
    count = max(1, min(round(num_active), _READ_BYTES // expert_bytes))
    rows_each = max(1, round(rows * experts.top_k * dims.num_expert_layers / num_active))
    return products_seconds([*experts.products] * count, rows_each, dims.dtype) * num_active / count


class _Engine:
    """A product as the engine computes it."""

    def __init__(self, weight: Tensor) -> None:
        self._plan = linear.plan_for(weight)
        self._operand = linear.pack(weight, self._plan)

    def __call__(self, x: Tensor) -> Tensor:
        return linear.matmul(x, self._operand, None, self._plan)


class _OneDNN:
    """A product by oneDNN, row-invariant or not; torch's plain product if oneDNN is missing."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.backends.mkldnn.is_available()
        self._operand = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight.clone()

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._operand, None, "none", [], "")
            return product
        return F.linear(x, self._operand)


_Shapes = dict[tuple[int, int], Tensor]


def _pass_seconds(
    product: type[_Engine] | type[_OneDNN], shapes: list[tuple[int, int]], weights: _Shapes, inputs: _Shapes
) -> float:
    """Seconds for one pass over all shapes; infinite if `product` does not support this dtype here."""
    try:
        calls = [(product(weights[shape]), inputs[shape]) for shape in shapes]

        def one_pass() -> None:
            for call, x in calls:
                call(x)

        one_pass()
        return _best_of(3, one_pass)
    except RuntimeError:
        return math.inf


def _bytes_per_step(dims: Dimensions, work: Work) -> float:
    """Bytes read per decode step: all weights, each prompt's KV once, and half of the sampled tokens' KV on average."""
    num_weights: float = sum(map(math.prod, [*dims.layers, dims.head]))
    if dims.experts is not None:
        active = dims.experts.num_active(work.num_sequences) * dims.num_expert_layers
        num_weights += active * sum(map(math.prod, dims.experts.products))
    kv_tokens = work.num_prompts * work.num_prompt_tokens + work.num_sequences * work.num_sampled_tokens / 2
    return num_weights * dims.dtype.itemsize + kv_tokens * dims.kv_bytes_per_token


def _flops(dims: Dimensions, rows: int) -> int:
    """Floating-point operations of one decode step's products."""
    found = sum(map(math.prod, [*dims.layers, dims.head]))
    if dims.experts is not None:
        found += dims.num_expert_layers * dims.experts.top_k * sum(map(math.prod, dims.experts.products))
    return 2 * rows * found


def _best_of(times: int, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
