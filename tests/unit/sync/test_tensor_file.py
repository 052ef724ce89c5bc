"""Files of tensors that are written one by one are those that the safetensors library reads."""

import pytest
import torch
from safetensors.torch import load_file

from sync.checkpoint import read_tensor_file
from sync.digests import tensor_digest
from sync.errors import ManifestMismatch
from sync.tensor_file import write_tensor_file

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "ids": torch.arange(5),
}
FORMS = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items()}


def test_a_written_file_is_read_by_safetensors_and_by_our_own_reader(tmp_path):
    asked = []
    specs = write_tensor_file(tmp_path / "file", FORMS, lambda name: asked.append(name) or TENSORS[name])
    assert sorted(asked) == sorted(TENSORS), "each is made once"
    read = load_file(tmp_path / "file")
    assert read.keys() == TENSORS.keys() and all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)
    assert all(torch.equal(e.materialize(), TENSORS[e.name]) for e in read_tensor_file(tmp_path / "file"))
    assert {spec.name: spec.digest for spec in specs} == {name: tensor_digest(t) for name, t in TENSORS.items()}


def test_a_file_that_is_there_and_a_tensor_of_another_form_are_refused(tmp_path):
    with pytest.raises(ManifestMismatch, match=r"'one' cannot be written to .*: it is float32 \[2\], expected"):
        write_tensor_file(tmp_path / "file", {"one": FORMS["one"]}, lambda name: torch.zeros(2))
    with pytest.raises(FileExistsError):
        write_tensor_file(tmp_path / "file", {"one": FORMS["one"]}, TENSORS.__getitem__)
