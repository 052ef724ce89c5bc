"""Every wrapper of the C++ kernels, given tensors it was not written for; run as a program of its own.

    python wrong_tensors.py SEED

Each call begins from arguments that are right, which stand in memory just before a page that must not be touched. One
or several of them are then made wrong. What comes is the right result, where the values are the same and only lie
otherwise, or a `ValueError` that names the argument; anything else is a line on stdout and exit status 1. A read
outside of an argument ends the program by a signal: the last line says in which call.
"""

import ctypes
import mmap
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine import exact
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention, decoder, gemm, rows, sampling
from rollout_engine.kernels.cpu.attention_backward import attention_gradients
from rollout_engine.kernels.routing_rule import RoutingRule
from rollout_engine.kernels.token_logprobs import token_logprobs
from rollout_engine.testing import tiny_model

NUM_PAIRS = 40
"""Calls of each wrapper with several wrong arguments."""
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip
PROT_NONE = 0


class Call(NamedTuple):
    """A wrapper and arguments that are right, by name."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends right before a protected page."""
    tensor = tensor.contiguous()
    num_bytes = tensor.nbytes
    if not num_bytes:
        return tensor
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) == 0
    place = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=size - num_bytes)
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same_values(tensor: Tensor) -> Iterator[Tensor]:
    """The same values in other places: spread out, or transposed and back."""
    if tensor.dim() and tensor.numel():
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        yield wide[..., ::2]
        yield tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if (tensor == tensor[:1]).all():
            yield tensor[:1].expand(tensor.shape)


def wrong_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Variants with other dtypes, shapes, layouts, devices and, for integers, values."""
    yield from (tensor.to(dtype) for dtype in DTYPES if dtype != tensor.dtype)
    yield torch.empty_like(tensor, device="meta")
    if tensor.is_floating_point():
        yield torch._neg_view(tensor)
    yield tensor[None]
    if not tensor.dim():
        return
    yield tensor[0] if len(tensor) else tensor.sum()
    for dim in range(tensor.dim()):
        yield tensor.narrow(dim, 0, 0)
        yield tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()
        yield torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
    yield tensor.to_sparse()
    if tensor.dtype == torch.int64:
        for value in (-1, -100, 2**31, 2**62, -(2**63), 10**6):
            yield tensor.index_fill(-1, torch.tensor([tensor.shape[-1] - 1]), value)


def wrong_arrays(array: np.ndarray) -> Iterator[np.ndarray]:
    """As `wrong_tensors`; strides may be negative here."""
    yield from (array.astype(dtype) for dtype in (np.int64, np.int32, np.float32, np.int8) if dtype != array.dtype)
    yield array[:0]
    yield array[:-1]
    yield np.append(array, array[-1:])
    yield np.repeat(array, 2)[::2]
    yield np.flip(np.flip(array).copy())
    for value in (-1, 2**31 - 1, -(2**31)):
        changed = array.copy()
        changed[-1] = value
        yield changed
    if array.dtype == np.int64:
        yield np.where(array == array.max(), 2**62, array)


def wrong(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return list(wrong_tensors(value))
    if isinstance(value, np.ndarray):
        return list(wrong_arrays(value))
    return []


def sampling_calls() -> Iterator[Call]:
    for dtype in (torch.float32, torch.bfloat16):
        logits, temperatures, ids = floats(5, 259, dtype=dtype), torch.ones(5), torch.tensor([0, 258, 7, 7, 100])
        uniforms, greedy = torch.full((5,), 0.5, dtype=torch.float64), torch.tensor([True, False] * 2 + [False])
        rules = dict(
            temperature=torch.ones(5, dtype=torch.float64),
            top_k=torch.tensor([0, 3, 1, 0, 300]),
            top_p=torch.full((5,), 0.9, dtype=torch.float64),
            min_p=torch.full((5,), 0.1, dtype=torch.float64),
        )

        masks = dict(bits=torch.full((2, 9), 0x5555, dtype=torch.int32), places=torch.tensor([-1, 0, 1, 1, -1]))

        def draw(temperature: Tensor, **given: Tensor) -> Any:
            rules = sampling.Truncation(temperature, *(given.pop(name) for name in ("top_k", "top_p", "min_p")))
            return sampling.PreparedRows(**given, rules=rules).draw()[0]

        def redraw(bits: Tensor, places: Tensor, temperature: Tensor, **given: Tensor) -> Any:
            rules = sampling.Truncation(temperature, *(given.pop(name) for name in ("top_k", "top_p", "min_p")))
            stats = sampling.RowStats(*(given.pop(name) for name in sampling.RowStats._fields))
            kept = sampling.KeptTokens(*(given.pop(f"kept.{name}") for name in sampling.KeptTokens._fields))
            rows = sampling.PreparedRows(**given, rules=rules, drawn=(stats, kept))
            rows.redraw(sampling.TokenMasks(bits, places))
            return stats

        common = dict(logits=logits, temperatures=temperatures)
        drawn = common | dict(uniforms=uniforms, greedy=greedy) | rules
        yield Call("draw", draw, drawn)
        rows = sampling.PreparedRows(logits, temperatures, uniforms, greedy, sampling.Truncation(*rules.values()))
        stats, kept = rows.draw()
        assert kept is not None
        columns = stats._asdict() | {f"kept.{name}": column for name, column in kept._asdict().items()}
        yield Call("redraw", redraw, drawn | masks | columns)
        yield Call("score", sampling.score, common | dict(tokens=ids))
        figures = sampling.score(logits, temperatures, ids)._asdict()

        def gradient(logits: Tensor, temperatures: Tensor, grad: Tensor, **figures: Tensor) -> Any:
            return sampling.gradient(logits, temperatures, sampling.RowStats(**figures), grad)

        yield Call("gradient", gradient, common | dict(grad=floats(5)) | figures)
        yield Call("token_logprobs", token_logprobs, dict(logits=logits, token_ids=ids, temperature=temperatures))
    yield Call("uniforms", sampling.uniforms, dict(seeds=torch.arange(6), positions=torch.arange(6)))


def row_calls() -> Iterator[Call]:
    for dtype in (torch.float32, torch.bfloat16):
        x = floats(3, 4, 33, dtype=dtype)
        yield Call("norm", rows.norm, dict(x=x, weight=floats(33, dtype=dtype), epsilon=1e-6))
        yield Call("activate", rows.activate, dict(gate=x))
        yield Call("activate and multiply", rows.activate, dict(gate=x, up=floats(3, 4, 33, dtype=dtype) + 1))


def product_calls() -> Iterator[Call]:
    for dtype in (torch.float32, torch.bfloat16):
        weight = floats(70, 33, dtype=dtype)
        packed = gemm.pack(weight)

        def pack(weight: Tensor, panels: Tensor) -> Any:
            return gemm.pack(weight, panels).panels

        def pack_in_place(panels: Tensor, like: Tensor = weight) -> Any:
            return gemm.pack_in_place(panels, like).panels

        def unpack(panels: Tensor, out: Tensor, like: gemm.PackedWeight = packed) -> Any:
            return gemm.unpack(like._replace(panels=panels), out)

        def multiply(x: Tensor, panels: Tensor, bias: Tensor | None, like: gemm.PackedWeight = packed) -> Any:
            return gemm.matmul(x, like._replace(panels=panels), bias)

        def select(indices: Tensor, like: gemm.PackedWeight = packed) -> Any:
            return gemm.select_rows(like, indices)

        yield Call("pack", pack, dict(weight=weight, panels=torch.zeros_like(packed.panels)))
        yield Call("pack in place", pack_in_place, dict(panels=packed.panels))
        yield Call("unpack", unpack, dict(panels=packed.panels, out=torch.zeros_like(packed.panels)))
        for num_rows in (1, 3, 40):
            x = floats(num_rows, 33, dtype=dtype)
            yield Call("multiply", multiply, dict(x=x, panels=packed.panels, bias=floats(70, dtype=dtype)))
        yield Call("select rows", select, dict(indices=torch.tensor([[0, 69], [3, 3]])))


def attention_calls() -> Iterator[Call]:
    columns = dict(
        first_positions=np.array([0, 20]),
        token_starts=np.array([0, 5, 6]),
        blocks=np.array([2, 3, 1], np.int32),
        block_starts=np.array([0, 1]),
    )
    for dtype in (torch.float32, torch.bfloat16):
        layer = attention.KVLayer(4, 2, 16, 8, block_size=16, dtype=dtype)

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            sinks: Tensor,
            lse: Tensor,
            layer: attention.KVLayer = layer,
            **columns: np.ndarray,
        ) -> Any:
            plan = attention.AttentionPlan(attention.ChunkColumns(**columns), block_size=16, num_kv_heads=2)
            return layer.attend(plan, q, k, v, AttentionParams(0.3), sinks=sinks, lse=lse)

        q, k, v = floats(6, 4, 16, dtype=dtype), floats(6, 2, 16, dtype=dtype), floats(6, 2, 8, dtype=dtype)
        yield Call("attend", attend, dict(q=q, k=k, v=v, sinks=floats(4), lse=torch.zeros(6, 4)) | columns)

        def attend_dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
            return attention.attend_dense(q, k, v, AttentionParams(0.3), sinks)[0]

        dense = (x[None].transpose(1, 2).contiguous() for x in (q, k, v))
        dense = dict(zip("qkv", dense, strict=True))
        yield Call("attend dense", attend_dense, dense | dict(sinks=floats(4)))

        def gradients(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Any:
            return attention_gradients(q, k, v, out, lse, grad, AttentionParams(0.3))

        results = dict(out=floats(1, 6, 4, 8, dtype=dtype), grad=floats(1, 6, 4, 8, dtype=dtype), lse=floats(1, 6, 4))
        yield Call("attention gradients", gradients, dense | results)


def decoder_calls() -> Iterator[Call]:
    for has_mixture in (False, True):
        yield from _calls_of_a_layer(has_mixture=has_mixture)


def _calls_of_a_layer(*, has_mixture: bool) -> Iterator[Call]:
    """One of hidden size 24, 3 query heads and 1 key/value head of 8 channels, an MLP or 2 experts, over 6 tokens."""
    dtype, kind = torch.float32, " of a mixture" if has_mixture else ""
    matrices = {"qkv": (40, 24), "out": (24, 24), "gate_up": (64, 24), "down": (24, 32)}
    matrices |= {"router": (2, 24)} if has_mixture else {}
    packed = {name: gemm.pack(floats(*shape)) for name, shape in matrices.items()}
    vectors = dict(attention_norm=floats(24), mlp_norm=floats(24), q_norm=floats(8), k_norm=floats(8), bias=floats(40))
    plan = attention.AttentionPlan([attention.Chunk(0, 6, [1])], block_size=16, num_kv_heads=1)

    def made(bias: Tensor, **given: Tensor) -> decoder.Decoder:
        products = {
            name: decoder.Product(packed[name]._replace(panels=given[name]), bias if name == "qkv" else None)
            for name in packed
        }
        norms = {name: decoder.Norm(given[name], 1e-6) for name in vectors if name != "bias"}
        mlp: decoder.MLP | decoder.Mixture = decoder.MLP(products["gate_up"], products["down"])
        if has_mixture:
            mlp = decoder.Mixture(products["router"], [mlp, mlp], 0, decoder.Routing(1, RoutingRule(True, True)))
        layer = decoder.LayerWeights(
            **norms,
            inputs=[products["qkv"]],
            out=products["out"],
            mlp=mlp,
            num_heads=3,
            attention_params=AttentionParams(0.3),
        )
        return decoder.Decoder([layer], [attention.KVLayer(2, 1, 8, 8, block_size=16, dtype=dtype)])

    def run(hidden: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, **given: Tensor) -> Any:
        hidden = hidden.clone() if hidden.is_contiguous() else hidden
        made(**given).run(hidden, cos, sin, rows, plan)
        return hidden

    def run_between(norm: Tensor, rows: Tensor, **given: Tensor) -> Any:
        own = {name: given.pop(name) for name in decoder.DecoderEnds._fields if name not in ("norm", "factor")}
        return made(**given).run_between(decoder.DecoderEnds(norm=decoder.Norm(norm, 1e-6), **own), rows, plan)

    panels = {name: weight.panels for name, weight in packed.items()}
    rows = dict(rows=torch.tensor([5, 0]))
    activations = dict(hidden=floats(6, 24), cos=floats(6, 8), sin=floats(6, 8))
    yield Call(f"decoder{kind}", run, activations | rows | vectors | panels)
    ids = dict(token_ids=torch.tensor([4, 0, 3, 3, 1, 2]), positions=torch.arange(6)) | rows
    tables = dict(embedding=floats(5, 24), cos=floats(9, 8), sin=floats(9, 8), norm=floats(24))
    yield Call(f"decoder between{kind}", run_between, ids | tables | vectors | panels)


def trainer_calls() -> Iterator[Call]:
    model = exact.enable(tiny_model("llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1))

    def logprobs(input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return exact.token_logprobs(model, input_ids, attention_mask)

    ids = torch.randint(3, 259, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 7, dtype=torch.bool)
    yield Call("exact.token_logprobs", logprobs, dict(input_ids=ids, attention_mask=mask))
    yield Call("exact.token_logprobs without a mask", logprobs, dict(input_ids=ids))


def attempt(call: Call, arguments: dict[str, Any]) -> Any:
    """The result, or None where it raised `ValueError`; any other error is reported."""
    try:
        with torch.no_grad():
            return call.function(**arguments)
    except ValueError as refusal:
        if not any(name in str(refusal) for name in (*arguments, "token_ids")):
            raise AssertionError(f"no argument is named: {refusal}") from refusal
        return None


def described(arguments: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, Tensor | np.ndarray):
            device = f" on {value.device}" if isinstance(value, Tensor) else ""
            return f"{value.dtype}{list(value.shape)}{device}"
        return repr(value)

    return ", ".join(f"{name}={one(value)}" for name, value in arguments.items())


def check(call: Call, changes: dict[str, Any], expected: Any = None) -> list[str]:
    """What is not as it should be when `changes` replace some arguments."""
    arguments = call.arguments | changes
    line = f"{call.name}: {described(changes)}"
    print(line, flush=True)
    try:
        result = attempt(call, arguments)
    except Exception as problem:
        if isinstance(problem, RuntimeError) and any(map(is_sparse, changes.values())):
            return []  # torch's own refusal
        return [f"FAILED {line}: {type(problem).__name__}: {problem}"]
    if expected is None or result is None:
        return []
    same = all(map(equal, as_list(expected), as_list(result)))
    return [] if same else [f"FAILED {line}: another result than of the same values in a row"]


def is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_sparse


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def check_all(call: Call, rng: random.Random) -> list[str]:
    arguments = {name: guarded(x) if isinstance(x, Tensor) else x for name, x in call.arguments.items()}
    call = call._replace(arguments=arguments)
    print(call.name, flush=True)
    with torch.no_grad():
        expected = call.function(**arguments)
    failures = []
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        for other in same_values(value):
            failures += check(call, {name: other}, expected)
    each = {name: wrong(value) for name, value in arguments.items()}
    for name, others in each.items():
        for other in others:
            failures += check(call, {name: guarded_if_dense(other)})
    some = [name for name, others in each.items() if others]
    for _ in range(NUM_PAIRS if len(some) > 1 else 0):
        chosen = rng.sample(some, rng.randint(2, min(3, len(some))))
        failures += check(call, {name: guarded_if_dense(rng.choice(each[name])) for name in chosen})
    return failures


def guarded_if_dense(value: Any) -> Any:
    plain = isinstance(value, Tensor) and value.is_cpu and value.layout is torch.strided
    return guarded(value) if plain and value.is_contiguous() and not value.is_neg() else value


def main() -> int:
    torch.set_num_threads(1)
    rng = random.Random(int(sys.argv[1]))
    makers = (sampling_calls, row_calls, product_calls, attention_calls, decoder_calls, trainer_calls)
    failures = [failure for make in makers for call in make() for failure in check_all(call, rng)]
    print(*failures, sep="\n", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
