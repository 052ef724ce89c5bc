"""Damaged checkpoints are refused with a typed error, or have the weights that their files say.

A flipped bit of a weight, or of a number in config.json, is a legal other one: weights are compared with the file.
"""

import json
import math
import random
import shutil
import warnings

import numpy as np
import pytest
import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.gguf.header import GgufHeader
from rollout_engine.model.loading.checkpoint import read_entries
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.update_files import read_update
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.construct import construct
from rollout_engine.testing import tiny_checkpoint, tiny_config, tiny_model
from rollout_engine.text.default_params import read_default_params
from rollout_engine.text.tokenizer import TextCodec
from sync.errors import SyncError
from sync.offer import check_source
from tests.fuzz.damaged_files import damage, stored_tensors
from tests.gguf_files import NAMES, metadata_of, quantised, tensors_of, write_gguf
from tests.quantised_files import quantise_checkpoint

gguf = pytest.importorskip("gguf")

SIZES = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=8)
GGUF = "model.gguf"
QUANTISED = ["fp8-blocks", "gptq4", "pack4-group-asymmetric", "awq"]
BATCH = 100
"""Cases that are written before the first is read: a file that has just changed is waited for."""
NUM_PARTS = 20
"""Tests that share the twelve thousand: one of all would take longer on a busy machine than a test may."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories by name: a plain checkpoint, one in shards, and quantised ones, each next to its float weights."""
    found = {"single": tiny_checkpoint(tmp_path_factory.mktemp("single") / "m", **SIZES)}
    found["sharded"] = tmp_path_factory.mktemp("sharded")
    tiny_model(**SIZES).save_pretrained(found["sharded"], max_shard_size="40KB")
    assert len(list(found["sharded"].glob("*.safetensors"))) > 1
    for name in QUANTISED:
        folder = tmp_path_factory.mktemp(name)
        quantise_checkpoint(tiny_checkpoint(folder / "plain", **SIZES), folder / "quantised", name)
        found[name] = folder / "quantised"
    found["gguf"] = tmp_path_factory.mktemp("gguf")
    model = tiny_model(**SIZES)
    write_gguf(found["gguf"] / GGUF, metadata_of(model.config), quantised(tensors_of(model), "Q8_0"))
    return found


def damaged_copies(source, folder, names, seeds):
    """(seed, the damage that was done, the directory) of each seed, `BATCH` at a time."""
    for start in range(0, len(seeds), BATCH):
        cases = []
        for seed in seeds[start : start + BATCH]:
            rng = random.Random(seed)
            target = folder / str(seed)
            shutil.copytree(source, target)
            done = damage(target, rng.choice(names), rng)
            cases.append((seed, done, target))
        yield from cases
        for _, _, target in cases:
            shutil.rmtree(target, ignore_errors=True)


def attempt(case, kinds, call, *arguments):
    """The result of a call, in a tuple; None if an error of `kinds` refuses it. Any other error fails the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return (call(*arguments),)
    except kinds as problem:
        assert str(problem), f"{case}: an error without words"
        return None
    except BaseException as problem:
        raise AssertionError(f"{case}: {type(problem).__name__}: {problem}") from problem


def load_weights(table, directory) -> None:
    for view in table.views.values():
        view.fill_(torch.nan)
    table.load(read_entries(directory))


def check_weights(checkpoints, tmp_path, seeds) -> None:
    table = WeightTable.of(construct(tiny_config(**SIZES), dtype=torch.float32, attention="eager"))
    refused = 0
    sources = {name: path for name, path in checkpoints.items() if name != "gguf"}
    for base, source in sources.items():
        table.load(read_entries(source))
        original, raw = {n: v.clone() for n, v in table.views.items()}, stored_tensors(source)
        names = [p.name for p in source.iterdir() if ".safetensors" in p.name]
        if base in QUANTISED:
            names.append("config.json")
        (tmp_path / base).mkdir()
        for seed, done, target in damaged_copies(source, tmp_path / base, names, seeds[:: len(sources)]):
            case = f"{base} {seed} ({done})"
            if attempt(case, ConfigError, load_weights, table, target) is None:
                refused += 1
                continue
            found = stored_tensors(target)
            if base not in QUANTISED:
                expected = found
            elif raw.keys() == found.keys() and all(same_bits(raw[name], found[name]) for name in raw):
                expected = {} if done.endswith("config.json") else original
            else:  # another stored code, scale or index
                expected = {}
            wrong = [n for n, v in table.views.items() if n in expected and not same_bits(v, expected[n].float())]
            assert not wrong and not any(bool(v.isnan().all()) for v in table.views.values()), f"{case}: {wrong}"
    assert refused > len(seeds) / 3


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def check_configurations(checkpoints, tmp_path, seeds) -> None:
    live = tiny_config(**SIZES)
    for seed, done, target in damaged_copies(checkpoints["single"], tmp_path, ["config.json"], seeds):
        case, config = f"{seed} ({done})", EngineConfig(model=str(target), dtype="float32", max_model_len=64)
        if (loaded := attempt(case, ConfigError, load_model, config)) is not None:
            expected, state = stored_tensors(target), loaded[0].module.state_dict()
            assert [name for name in state if not torch.equal(state[name], expected[name])] == [], case
        if (updated := attempt(case, SyncError, read_update, target, live)) is not None:
            assert {name for name, _ in updated[0]} == stored_tensors(target).keys(), case


def check_gguf_files(checkpoints, tmp_path, seeds) -> None:
    """Damaged GGUF files are refused by a load and an update, or have the weights that are in their data."""
    table = WeightTable.of(construct(tiny_config(**SIZES), dtype=torch.float32, attention="eager"))
    metadata = {name: ("float32", tuple(view.shape)) for name, view in table.views.items()}
    original, refused = GgufHeader.read(checkpoints["gguf"] / GGUF), 0
    for seed, done, target in damaged_copies(checkpoints["gguf"], tmp_path, [GGUF], seeds):
        case, path = f"{seed} ({done})", target / GGUF
        updated = attempt(case, SyncError, update_weights, metadata, path)
        if attempt(case, ConfigError, load_weights, table, target) is None:
            assert updated is None or updated[0].keys() != table.views.keys(), case
            refused += 1
            continue
        expected = weights_in_data(path, original)
        for found in (table.views, {} if updated is None else updated[0]):
            wrong = [name for name, value in found.items() if not same_bits(value, expected[name])]
            assert not wrong, f"{case}: {wrong}"
    assert refused > len(seeds) / 3


def update_weights(metadata, path):
    """The weights at a path as an update reads them, as far as it does before it asks whether they are all."""
    pairs = read_update(path, tiny_config(**SIZES))
    check_source(pairs, metadata)
    return {name: tensor.materialize() for name, tensor in pairs}


def weights_in_data(path, header):
    """The weights of a GGUF file of qwen3, whatever its own header says, at the places of another one's."""
    content, found = np.fromfile(path, np.uint8), {}
    for theirs, tensor in header.tensors.items():
        form = gguf.GGMLQuantizationType(tensor.type)
        size, num_bytes = gguf.GGML_QUANT_SIZES[form]
        rows = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else 1
        stored = content[tensor.start :][: rows * tensor.shape[-1] // size * num_bytes].reshape(rows, -1)
        with np.errstate(all="ignore"):  # a scale may be infinite now
            values = torch.from_numpy(gguf.quants.dequantize(stored, form).astype(np.float32))
        found[own_name(theirs)] = values.reshape(tensor.shape)
    return found


def own_name(theirs):
    """The name that a module has for a tensor of a GGUF file."""
    layer, _, name = theirs.removeprefix("blk.").partition(".") if theirs.startswith("blk.") else ("", "", theirs)
    stem, kind = name.rsplit(".", 1)
    ours = next(ours for ours, each in NAMES.items() if each == stem)
    return f"model.layers.{layer}.{ours}.{kind}" if layer else f"{ours}.{kind}"


def check_texts(checkpoints, tmp_path, seeds) -> None:
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    names = [name for name in names if (checkpoints["single"] / name).exists()]
    for seed, done, target in damaged_copies(checkpoints["single"], tmp_path, names, seeds):
        case = f"{seed} ({done})"
        if (loaded := attempt(case, ConfigError, TextCodec.from_pretrained, str(target))) is not None:
            assert loaded[0].hf.get_vocab(), case
            attempt(case, RequestError, loaded[0].encode, "to be or not")


def check_defaults(checkpoints, tmp_path, seeds) -> None:
    source, name = checkpoints["single"], "generation_config.json"
    content = json.loads((source / name).read_text()) | {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [2, 5]}
    (source / name).write_text(json.dumps(content))
    for seed, done, target in damaged_copies(source, tmp_path, [name], seeds):
        attempt(f"{seed} ({done})", (ConfigError, RequestError), read_default_params, str(target))


def check_all(checkpoints, tmp_path, part=0, **counts) -> None:
    for name, count in counts.items():
        (tmp_path / name).mkdir()
        CHECKS[name](checkpoints, tmp_path / name, range(part * count, (part + 1) * count))


CHECKS = dict(
    weights=check_weights,
    gguf_files=check_gguf_files,
    configurations=check_configurations,
    texts=check_texts,
    defaults=check_defaults,
)


def test_some_hundreds_of_damaged_files(checkpoints, tmp_path):
    check_all(checkpoints, tmp_path, weights=240, gguf_files=60, configurations=12, texts=40, defaults=40)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_twelve_thousand_damaged_files(checkpoints, tmp_path, part):
    check_all(checkpoints, tmp_path, part, weights=400, gguf_files=100, configurations=15, texts=50, defaults=35)
