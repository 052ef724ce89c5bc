"""What a manifest says about tensors, and what it refuses."""

import msgspec
import pytest
import torch

from sync.digests import PIECE_BYTES
from sync.errors import ManifestMismatch
from sync.manifest import TensorSpec, WeightManifest, describe, first_names, total_digest


def specs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [describe(name, torch.randn(3, 4, generator=generator)) for name in ("a", "b", "c")]


def test_total_digest_does_not_depend_on_order():
    assert total_digest(specs()) == total_digest(reversed(specs()))


@pytest.mark.parametrize("field,value", [("name", "z"), ("shape", (4, 3)), ("dtype", "bfloat16"), ("digest", "0" * 32)])
def test_total_digest_depends_on_every_field(field, value):
    changed = specs()
    changed[1] = msgspec.structs.replace(changed[1], **{field: value})
    assert total_digest(changed) != total_digest(specs())


def test_manifest_survives_the_wire():
    manifest = WeightManifest.of(3, specs(), [["a", "tied"]])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest)
    assert again == manifest
    again.check()


def test_bytes_count_the_dtype():
    sizes = [TensorSpec("a", (2, 3), "bfloat16", ""), TensorSpec("b", (), "float32", "")]
    assert WeightManifest.of(1, sizes).num_bytes == 16


def test_a_name_listed_twice_is_refused():
    with pytest.raises(ManifestMismatch, match="lists a more than once"):
        WeightManifest.of(1, [*specs(), specs()[0]]).check()


@pytest.mark.parametrize(
    "spec,message",
    [
        (TensorSpec("a", (2, -1), "float32", ""), r"'a' has shape \[2, -1\]"),
        (TensorSpec("a", (2**31, 2**31), "int8", ""), "at most 2\\*\\*50 bytes"),
        (TensorSpec("a", (2,), "complex64", ""), "dtype 'complex64'. Known: float64"),
        (TensorSpec("a", (2,), "Tensor", ""), "dtype 'Tensor'"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(spec, message):
    with pytest.raises(ManifestMismatch, match=message):
        WeightManifest.of(1, [spec]).check()


@pytest.mark.parametrize("version", [-1, 2**63, 1.0, "1", True, None])
def test_a_version_that_is_no_count_is_refused(version):
    with pytest.raises(ManifestMismatch, match="version=.* must be an int"):
        WeightManifest.of(version, specs()).check()


@pytest.mark.parametrize("form", ["xxh3-128", "xxh3-128 of pieces of 65536 bytes"])
def test_digests_of_another_form_are_refused_by_what_they_are(form):
    manifest = msgspec.structs.replace(WeightManifest.of(1, specs()), digest_form=form)
    with pytest.raises(
        ManifestMismatch, match=f"another form: expected '.* of {PIECE_BYTES} bytes', came '{form}'. Have the"
    ):
        manifest.check()


def test_a_manifest_of_before_forms_had_names_is_refused():
    content = msgspec.json.encode(WeightManifest.of(1, specs()))
    older = msgspec.json.decode(content)
    del older["digest_form"]
    with pytest.raises(ManifestMismatch, match="came 'xxh3-128'"):
        msgspec.convert(older, WeightManifest).check()


def test_a_changed_list_under_the_old_digest_is_refused():
    manifest = msgspec.structs.replace(WeightManifest.of(1, specs()), tensors=specs(seed=1))
    with pytest.raises(ManifestMismatch, match="damaged"):
        manifest.check()


def test_messages_name_ten_and_count_the_rest():
    assert first_names(map(str, range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
