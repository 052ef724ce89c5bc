"""Quantised weights, read by `sync.quantised` and written by `tests.quantised_files`, which share no code."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sync.checkpoint import read_checkpoint
from sync.errors import ManifestMismatch
from sync.quantised import fp8, mxfp4
from tests.quantised_files import FORMATS, Encoded, words_of

NAME = "model.layers.0.mlp.up_proj"
SHAPE = (40, 64)


def write(directory, settings, stored) -> None:
    directory.mkdir(exist_ok=True)
    tensors = {NAME + ending: tensor for ending, tensor in stored.items()} | {"model.norm.weight": torch.ones(4)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))


def encode(name) -> Encoded:
    return FORMATS[name].encode(torch.empty(SHAPE), torch.Generator().manual_seed(1))


def read(directory) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.materialize() for tensor in read_checkpoint(directory)}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_the_format_denotes(tmp_path, name, caplog):
    encoded = encode(name)
    write(tmp_path, FORMATS[name].settings, encoded.stored)
    with caplog.at_level(logging.INFO, "sync"):
        found = read(tmp_path)
    assert found.keys() == {f"{NAME}.weight", "model.norm.weight"}
    assert found[f"{NAME}.weight"].dtype == torch.float32
    assert torch.equal(found[f"{NAME}.weight"], encoded.expected)
    assert "1 weight is dequantised in float32" in caplog.text


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_that_lacks_one_of_its_tensors_is_refused(tmp_path, name):
    encoded = encode(name)
    not_needed = (".g_idx", ".input_scale", ".activation_scale")
    for left_out in [ending for ending in encoded.stored if ending not in not_needed]:
        write(tmp_path, FORMATS[name].settings, {k: v for k, v in encoded.stored.items() if k != left_out})
        with pytest.raises(ManifestMismatch, match=rf"model\.safetensors: .*{NAME}"):
            read(tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_of_another_shape_or_dtype_is_refused(tmp_path, name):
    encoded = encode(name)
    for ending, tensor in encoded.stored.items():
        if ending in (".input_scale", ".activation_scale"):
            continue
        longer = torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]])
        for other in (longer, tensor.to(torch.float64)):
            write(tmp_path, FORMATS[name].settings, encoded.stored | {ending: other})
            with pytest.raises(ManifestMismatch, match=rf"model\.safetensors: .*{NAME}"):
                read(tmp_path)


def test_blocks_that_divide_the_weight_are_those_of_transformers():
    values = (torch.randn(64, 96) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(fp8.dequantise(values, scales, (32, 32)), expected)


def test_experts_of_gpt_oss_are_those_of_transformers(tmp_path):
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(1, 250, (3, 10, 4), generator=draw, dtype=torch.uint8)
    scales[0, 0, 0] = 0
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64).float()
    assert torch.equal(mxfp4.dequantise(blocks, scales), expected)
    stored = {"_blocks": blocks, "_scales": scales, "_bias": torch.zeros(3, 10)}
    write(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, stored)
    found = read(tmp_path)
    assert found.keys() == {NAME, f"{NAME}_bias", "model.norm.weight"} and torch.equal(found[NAME], expected)


@pytest.mark.quick(10)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read"),
        ({"quant_method": 3}, "quant_method 3 is not read"),
        ({"bits": 4}, "quant_method None is not read"),
        ({"quant_method": "gptq", "bits": 5}, r"Invalid enum value 5 - at `\$.bits`"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic has other settings"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is false"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(tmp_path, settings, message):
    write(tmp_path, settings, {".weight": torch.zeros(2, 2)})
    with pytest.raises(ManifestMismatch, match=rf"config\.json: .*{message}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "marlin-24"}, "format 'marlin-24' is not one of"),
        ({"quantization_status": "frozen"}, "frozen"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {"R3": {}}}}, "rotates activations"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}, "integers of 3 bits"),
        ({"config_groups": {"a": {"targets": ["re:.*down.*"], "weights": {}}}}, "no config_groups entry"),
    ],
)
def test_compressed_tensors_that_are_not_read_are_refused_by_name(tmp_path, change, message):
    write(tmp_path, FORMATS["pack4-group"].settings | change, encode("pack4-group").stored)
    with pytest.raises(ManifestMismatch, match=message):
        read(tmp_path)


def test_the_group_that_names_a_module_goes_before_one_of_its_class(tmp_path):
    one, other = FORMATS["pack4-group"].settings, FORMATS["int8-channel"].settings
    by_class = other["config_groups"]["group_0"] | {"format": "int-quantized"}
    by_name = one["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": [r"re:.*mlp\.up_proj$"]}
    settings = one | {"format": "mixed-precision", "config_groups": {"a": by_class, "b": by_name}}
    encoded = encode("pack4-group")
    write(tmp_path, settings, encoded.stored)
    assert torch.equal(read(tmp_path)[f"{NAME}.weight"], encoded.expected)


def test_zero_points_that_readers_understand_differently_are_refused(tmp_path):
    stored = encode("gptq4").stored
    write(tmp_path, FORMATS["gptq4"].settings, stored | {".qzeros": torch.full_like(stored[".qzeros"], -1)})
    with pytest.raises(ManifestMismatch, match="a stored zero point is 15"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"), [([0, 1] * 32, "does not have the inputs in order"), ([0] * 63 + [2], "beyond the 2")]
)
def test_groups_that_contradict_the_settings_are_refused(tmp_path, index, message):
    stored = encode("gptq4").stored | {".g_idx": torch.tensor(index, dtype=torch.int32)}
    write(tmp_path, FORMATS["gptq4"].settings, stored)
    with pytest.raises(ManifestMismatch, match=message):
        read(tmp_path)


def test_inputs_of_compressed_tensors_may_be_in_any_order(tmp_path):
    encoded = encode("pack4-group-asymmetric")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    codes = encoded.stored[".weight_packed"].numpy().view("uint32")
    nibbles = torch.tensor([[int(w) >> (4 * k) & 15 for w in row for k in range(8)] for row in codes])
    stored = encoded.stored | {
        ".weight_packed": words_of(nibbles[:, order].numpy(), 4),
        ".weight_g_idx": (torch.arange(64) // 16)[order].int(),
    }
    write(tmp_path, FORMATS["pack4-group-asymmetric"].settings, stored)
    assert torch.equal(read(tmp_path)[f"{NAME}.weight"], encoded.expected[:, order])


@pytest.mark.parametrize(("name", "ending"), [("fp8-blocks", ".weight"), ("fp8-blocks", ".weight_scale_inv")])
def test_codes_and_scales_that_are_no_numbers_are_refused(tmp_path, name, ending):
    stored = encode(name).stored
    stored[ending].view(torch.uint8)[:] = 0xFF
    write(tmp_path, FORMATS[name].settings, stored)
    with pytest.raises(ManifestMismatch, match=rf"'{NAME}\.weight' is not finite"):
        read(tmp_path)


def test_a_weight_may_be_stored_as_it_is(tmp_path):
    plain = {".weight": torch.ones(3, 5, dtype=torch.bfloat16)}
    for name in FORMATS:
        write(tmp_path, FORMATS[name].settings, plain)
        assert torch.equal(read(tmp_path)[f"{NAME}.weight"], plain[".weight"])


@pytest.mark.parametrize("name", ["gptq4", "pack4-group"])
def test_a_weight_that_is_stored_twice_is_refused(tmp_path, name):
    write(tmp_path, FORMATS[name].settings, encode(name).stored | {".weight": torch.ones(SHAPE)})
    with pytest.raises(ManifestMismatch, match=r"up_proj\.weight' is not a part of a weight of this format"):
        read(tmp_path)


def test_float8_without_settings_is_no_weight(tmp_path):
    save_file({"a.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ManifestMismatch, match=r"'a\.weight' is F8_E4M3, and .*config\.json has no quantization_config"
    ):
        read(tmp_path)


def test_a_weight_whose_tensors_are_in_two_shards_is_read(tmp_path):
    encoded = encode("fp8-blocks")
    write(tmp_path, FORMATS["fp8-blocks"].settings, encoded.stored)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for i, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part-{i}.safetensors")
    index = {name: f"part-{i}.safetensors" for i, name in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(read(tmp_path)[f"{NAME}.weight"], encoded.expected)
