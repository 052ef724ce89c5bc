"""Writes quantised checkpoints, element by element as the formats are specified, next to the float weights they denote.

Nothing here is shared with the readers of `sync.quantised`: bits are packed with Python's integers.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]


class Encoded(NamedTuple):
    """One weight as a format stores it."""

    stored: Stored
    """By the endings behind the weight's name without ".weight"."""
    expected: Tensor
    """float32, as the stored tensors denote it."""


class Format(NamedTuple):
    """A format with its settings."""

    settings: dict[str, object]
    encode: Callable[[Tensor, torch.Generator], Encoded]


def words_of(codes: np.ndarray, bits: int) -> Tensor:
    """Unsigned integers [N, C], packed row by row into a stream of bits -> int32 [N, ceil(C * bits / 32)]."""
    rows = []
    for row in codes.tolist():
        stream = sum(code << (i * bits) for i, code in enumerate(row))
        rows.append([stream >> (32 * w) & 0xFFFFFFFF for w in range(-(-len(row) * bits // 32))])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def integers(shape: tuple[int, ...], low: int, high: int, draw: torch.Generator) -> np.ndarray:
    return torch.randint(low, high, shape, generator=draw).numpy()


def scales(shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, generator=draw) * 0.02 + 0.01).to(dtype)


def affine(codes: np.ndarray, scale: Tensor, zero: np.ndarray, of: Callable[[int, int], tuple[int, int]]) -> Tensor:
    """w[o, i] = (code[o, i] - zero[of(o, i)]) * scale[of(o, i)], each product rounded to float32."""
    num_out, num_in = codes.shape
    factors = scale.float().numpy()
    result = np.empty((num_out, num_in), np.float32)
    for o in range(num_out):
        for i in range(num_in):
            result[o, i] = np.float32(int(codes[o, i]) - int(zero[of(o, i)])) * factors[of(o, i)]
    return torch.from_numpy(result)


def gptq(bits: int, group: int, *, version: int = 1, in_order: bool = True, with_index: bool = True) -> Format:
    settings = dict(
        quant_method="gptq", bits=bits, group_size=group, desc_act=not in_order, sym=False, damp_percent=0.1
    )
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"

    def encode(weight: Tensor, draw: torch.Generator) -> Encoded:
        num_out, num_in = weight.shape
        size = num_in if group == -1 else group
        num_groups = -(-num_in // size)
        index = [i // size for i in range(num_in)]
        if not in_order:
            index = [index[i] for i in torch.randperm(num_in, generator=draw).tolist()]
        codes = integers((num_out, num_in), 0, 2**bits, draw)
        zero = integers((num_groups, num_out), 1, 2**bits, draw)
        scale = scales((num_groups, num_out), draw, torch.float16)
        stored = {
            ".qweight": words_of(codes, bits).t().contiguous(),
            ".qzeros": words_of(zero - (version == 1), bits),
            ".scales": scale,
        }
        if with_index:
            stored[".g_idx"] = torch.tensor(index, dtype=torch.int32)
        return Encoded(stored, affine(codes, scale, zero, lambda o, i: (index[i], o)))

    return Format(settings, encode)


def awq(group: int) -> Format:
    places = {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}  # nibble of a word -> column

    def order(columns: np.ndarray) -> np.ndarray:
        out = np.empty_like(columns)
        for start in range(0, columns.shape[1], 8):
            for nibble, column in places.items():
                out[:, start + nibble] = columns[:, start + column]
        return out

    def encode(weight: Tensor, draw: torch.Generator) -> Encoded:
        num_out, num_in = weight.shape
        size = num_in if group == -1 else group
        codes = integers((num_out, num_in), 0, 16, draw)
        zero = integers((-(-num_in // size), num_out), 0, 16, draw)
        scale = scales(zero.shape, draw, torch.float16)
        stored = {".qweight": words_of(order(codes.T), 4), ".qzeros": words_of(order(zero), 4), ".scales": scale}
        return Encoded(stored, affine(codes, scale, zero, lambda o, i: (i // size, o)))

    settings = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
    return Format(settings | dict(modules_to_not_convert=["lm_head"]), encode)


def compressed(
    form: str, bits: int, strategy: str, *, group: int = 16, symmetric: bool = True, block: tuple[int, int] = (24, 40)
) -> Format:
    weights: dict[str, object] = dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, dynamic=False)
    is_float = form == "float-quantized"
    weights |= dict(type="float") if is_float else {}
    weights |= dict(group_size=group) if strategy == "group" else {}
    weights |= dict(block_structure=list(block)) if strategy == "block" else {}

    def encode(weight: Tensor, draw: torch.Generator) -> Encoded:
        num_out, num_in = weight.shape
        rows, columns = dict(tensor=(num_out, num_in), channel=(1, num_in), group=(1, group), block=block)[strategy]
        shape = (-(-num_out // rows), -(-num_in // columns))
        scale = scales(shape, draw, torch.bfloat16)
        half = 2 ** (bits - 1)
        zero = np.zeros(shape, np.int64) if symmetric else integers(shape, -half, half, draw)
        of = lambda o, i: (o // rows, i // columns)  # noqa: E731
        if is_float:
            codes = (torch.randn(weight.shape, generator=draw) * 50).to(torch.float8_e4m3fn)
            products = [[codes[o, i].float() * scale[of(o, i)].float() for i in range(num_in)] for o in range(num_out)]
            stored, expected = {".weight": codes}, torch.tensor(products)
        else:
            signed = integers((num_out, num_in), -half, half, draw)
            expected = affine(signed, scale, zero, of)
            stored = {".weight": torch.from_numpy(signed).to(torch.int8)}
            if form == "pack-quantized":
                shape_of = torch.tensor([num_out, num_in])
                stored = {".weight_packed": words_of(signed + half, bits), ".weight_shape": shape_of}
            if not symmetric:
                is_packed = form == "pack-quantized" and strategy != "tensor"
                packed = words_of((zero + half).T, bits).t().contiguous() if is_packed else None
                stored[".weight_zero_point"] = torch.from_numpy(zero).to(torch.int8) if packed is None else packed
        if strategy == "tensor":
            stored |= {name: tensor.reshape(1) for name, tensor in stored.items() if name == ".weight_zero_point"}
            scale = scale.reshape(1)
        return Encoded(stored | {".weight_scale": scale, ".input_scale": torch.ones(1)}, expected)

    settings = dict(
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
        kv_cache_scheme=None,
        config_groups={
            "group_0": dict(targets=["Linear"], weights=weights, input_activations=dict(num_bits=8, dynamic=True))
        },
    )
    return Format(settings, encode)


def fp8(block: tuple[int, int] | None, name: str = "_scale_inv", dtype: torch.dtype = torch.float32) -> Format:
    def encode(weight: Tensor, draw: torch.Generator) -> Encoded:
        num_out, num_in = weight.shape
        rows, columns = block or (num_out, num_in)
        shape = () if block is None else (-(-num_out // rows), -(-num_in // columns))
        scale = scales(shape, draw, torch.float32)
        if dtype == torch.float8_e8m0fnu:
            scale = torch.full(shape, 2.0**-7)
        codes = (torch.randn(weight.shape, generator=draw) * 50).to(torch.float8_e4m3fn)
        stored = scale.to(dtype)
        factor = stored.float()
        expected = torch.tensor(
            [
                [codes[o, i].float() * (factor[o // rows, i // columns] if block else factor) for i in range(num_in)]
                for o in range(num_out)
            ]
        )
        return Encoded({".weight": codes, f".weight{name}": stored, ".activation_scale": torch.ones(())}, expected)

    sizes = None if block is None else list(block)
    settings = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=sizes)
    return Format(settings | dict(modules_to_not_convert=["lm_head"]), encode)


FORMATS = {
    "fp8-blocks": fp8((24, 40)),
    "fp8-bfloat16-blocks": fp8((32, 32), dtype=torch.bfloat16),
    "fp8-e8m0-blocks": fp8((16, 64), dtype=torch.float8_e8m0fnu),
    "fp8-tensor": fp8(None),
    "fp8-tensor-scale": fp8(None, "_scale"),
    "pack4-group": compressed("pack-quantized", 4, "group"),
    "pack4-group-asymmetric": compressed("pack-quantized", 4, "group", symmetric=False),
    "pack4-channel-asymmetric": compressed("pack-quantized", 4, "channel", symmetric=False),
    "pack8-channel": compressed("pack-quantized", 8, "channel"),
    "pack4-tensor": compressed("pack-quantized", 4, "tensor"),
    "int8-channel": compressed("int-quantized", 8, "channel"),
    "int8-tensor-asymmetric": compressed("int-quantized", 8, "tensor", symmetric=False),
    "int8-group-asymmetric": compressed("naive-quantized", 8, "group", symmetric=False),
    "float8-channel": compressed("float-quantized", 8, "channel"),
    "float8-tensor": compressed("float-quantized", 8, "tensor"),
    "float8-block": compressed("float-quantized", 8, "block"),
    "awq": awq(32),
    "awq-all-inputs": awq(-1),
    "gptq4": gptq(4, 32),
    "gptq4-v2-desc-act": gptq(4, 16, version=2, in_order=False),
    "gptq4-no-index": gptq(4, -1, with_index=False),
    "gptq2": gptq(2, 32),
    "gptq3": gptq(3, 32),
    "gptq8-desc-act": gptq(8, 32, in_order=False),
}


def quantise_checkpoint(plain: Path, quantised: Path, name: str, seed: int = 0) -> None:
    """Copy a checkpoint of one file with its projections in a format of `FORMATS`; `plain` gets the float32 weights."""
    shutil.copytree(plain, quantised)
    form, draw = FORMATS[name], torch.Generator().manual_seed(seed)
    tensors = load_file(plain / "model.safetensors")
    stored, floats = {}, {}
    for key, tensor in tensors.items():
        if "_proj" in key and key.endswith(".weight"):
            encoded = form.encode(tensor, draw)
            floats[key] = encoded.expected
            stored |= {key.removesuffix(".weight") + ending: part for ending, part in encoded.stored.items()}
        else:
            stored[key] = floats[key] = tensor
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": form.settings}))


def quantise_experts(plain: Path, quantised: Path, seed: int = 0) -> int:
    """Copy a checkpoint of gpt-oss with experts in MXFP4; `plain` gets the float32 weights. Returns their number."""
    shutil.copytree(plain, quantised)
    draw = torch.Generator().manual_seed(seed)
    floats, stored = (load_file(path / "model.safetensors") for path in (plain, quantised))
    experts = [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]
    for name in experts:
        num_experts, num_in, num_out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, num_out, num_in // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], generator=draw, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = _mxfp4(blocks, scales)
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return len(experts)


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, N, K / 32, 16] codes, the low nibble first, and exponents with bias 127 -> [E, K, N]."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    found = values[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * 2.0 ** (scales.float() - 127)[..., None]
    return found.flatten(-2).mT.contiguous()
