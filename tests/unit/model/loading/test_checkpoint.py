import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.loading.checkpoint import INDEX_FILE, SINGLE_FILE, read_entries

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}


def write_header(path, header: dict[str, object], data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(directory, weight_map: dict[str, str]) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"part-{i}.safetensors")
    write_index(tmp_path, {name: f"part-{i}.safetensors" for i, name in enumerate(TENSORS)})
    return tmp_path


def read(directory) -> dict[str, torch.Tensor]:
    return {entry.name: entry.materialize() for entry in read_entries(directory)}


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_every_tensor_of_every_file(layout, request):
    found = read(request.getfixturevalue(layout))
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_entries_carry_dtype_shape_and_file(single):
    entries = {entry.name: entry for entry in read_entries(single)}
    entry = entries["a.weight"]
    assert (entry.dtype, entry.stored_dtype, entry.shape) == (torch.float32, "F32", (2, 3))
    assert entry.path == single / SINGLE_FILE and entries["b.bias"].dtype == torch.bfloat16


def test_a_truncated_file_names_itself_and_a_tensor_that_is_cut(single):
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short: tensor '(a\.weight|b\.bias)'"):
        read_entries(single)


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_a_file_cut_within_its_header_is_refused(single, size):
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"model\.safetensors .*cut short"):
        read_entries(single)


def test_a_pickle_named_safetensors_is_refused_unread(tmp_path):
    torch.save(TENSORS, tmp_path / SINGLE_FILE)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        read_entries(tmp_path)


@pytest.mark.parametrize("header", [b"{", b"[1]", b'{"a": 1}', b"\xff\xfe", b'{"\xff": {}}'])
def test_a_header_that_is_not_one_is_refused(tmp_path, header):
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ConfigError, match="not valid"):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    "declared",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    ],
)
def test_a_label_that_contradicts_its_bytes_names_file_and_tensor(tmp_path, declared):
    write_header(tmp_path / SINGLE_FILE, {"x.weight": declared}, bytes(8))
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor 'x\.weight' (is mislabelled|has shape)"):
        read_entries(tmp_path)


def test_an_unknown_dtype_names_the_tensor(tmp_path):
    write_header(tmp_path / SINGLE_FILE, {"x": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}, bytes(1))
    with pytest.raises(ConfigError, match="tensor 'x' has dtype F7"):
        read_entries(tmp_path)


def test_overlapping_tensors_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_header(tmp_path / SINGLE_FILE, {"x": entry, "y": entry}, bytes(8))
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a valid safetensors file: tensor 'y' begins at"):
        read_entries(tmp_path)


def test_a_shard_the_index_names_must_exist(sharded):
    (sharded / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match="part-1.safetensors"):
        read_entries(sharded)


def test_a_tensor_the_index_places_must_be_there(sharded):
    write_index(sharded, {"a.weight": "part-1.safetensors", "b.bias": "part-1.safetensors"})
    with pytest.raises(ConfigError, match="says tensor 'a.weight' is in 'part-1.safetensors'"):
        read_entries(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file(TENSORS, sharded / "part-0.safetensors")
    with pytest.raises(ConfigError, match="'b.bias' is in two shards"):
        read_entries(sharded)


def test_an_index_cannot_name_files_outside_its_directory(sharded):
    inner = sharded / "inner"
    inner.mkdir()
    write_index(inner, {"a.weight": "../part-0.safetensors"})
    with pytest.raises(ConfigError, match="not in that directory"):
        read_entries(inner)


@pytest.mark.parametrize("content", [b'{"weight_map": 3}', b'{"weight_map": {"\xff": "a.safetensors"}}'])
def test_a_broken_index_is_refused(sharded, content):
    (sharded / INDEX_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="not a valid index"):
        read_entries(sharded)


def test_pickled_weights_are_refused_with_the_reason(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(ConfigError, match="pickle"):
        read_entries(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has neither model.safetensors nor"):
        read_entries(tmp_path)
