"""A safetensors checkpoint directory is a weight source."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sync.errors import ManifestMismatch
from sync.source import read_source

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def shards(directory, **weight_map):
    """Each tensor in a file of its own, and an index that says `weight_map`."""
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, directory / f"{name}.safetensors")
    weight_map = {"a": "a.safetensors", "b": "b.safetensors"} | weight_map
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))


def same(source):
    tensors = {name: tensor.materialize() for name, tensor in read_source(source)}
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[n], TENSORS[n]) for n in TENSORS)


def test_one_file_is_read(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert same(tmp_path)
    assert same(str(tmp_path))


def test_shards_are_read(tmp_path):
    shards(tmp_path)
    assert same(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 5, 40, -1])
def test_a_file_cut_short_is_refused_by_name(tmp_path, num_bytes):
    save_file(TENSORS, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:num_bytes])
    with pytest.raises(ManifestMismatch, match=r"model\.safetensors .*cut short"):
        read_source(tmp_path)


@pytest.mark.parametrize(
    "weight_map,message",
    [
        ({"c": "b.safetensors"}, "says tensor 'c' is in 'b.safetensors', and it is not"),
        ({"b": "a.safetensors"}, "says tensor 'b' is in 'a.safetensors', and it is not"),
        ({"b": "c.safetensors"}, "shard 'c.safetensors', which is not in that directory"),
        ({"b": "../b.safetensors"}, "which is not in that directory"),
        ({"a": "b.safetensors", "b": "a.safetensors"}, "and it is not"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(tmp_path, weight_map, message):
    shards(tmp_path, **weight_map)
    with pytest.raises(ManifestMismatch, match=message):
        read_source(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b'{"weight_map": {"\xff": "a.safetensors"}}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ManifestMismatch, match="not a valid index"):
        read_source(tmp_path)
