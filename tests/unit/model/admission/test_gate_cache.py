import pytest
import torch

from rollout_engine.model.admission import gate_cache
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.testing import tiny_config
from sync.own_files import CACHE_VARIABLE

GEOMETRY = [LayerGeometry(4, 2, 24, 12, 0.25, 8, None, False), LayerGeometry(4, 2, 24, 12, 0.25, None, 30.0, True)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "gate"


def key(architecture: str = "qwen3", dtype: torch.dtype = torch.float32, **overrides) -> str:
    return gate_cache.key_of(construct(tiny_config(architecture, **overrides), dtype=dtype, attention="eager"))


def test_what_is_written_is_read(cache):
    assert gate_cache.read("some-key") is None
    gate_cache.write("some-key", GEOMETRY)
    assert gate_cache.read("some-key") == GEOMETRY
    assert gate_cache.read("other-key") is None
    assert [path.name for path in cache.iterdir()] == ["some-key.json"]


@pytest.mark.parametrize("content", [b"", b"[{", b'{"a": 1}', b'[{"\xff": 1}]', b'[{"num_heads": "four"}]'])
def test_a_damaged_file_is_as_good_as_none(cache, content):
    gate_cache.write("some-key", GEOMETRY)
    (cache / "some-key.json").write_bytes(content)
    assert gate_cache.read("some-key") is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    gate_cache.write("some-key", GEOMETRY)
    assert gate_cache.read("some-key") is None


def test_the_user_cache_directory_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gate_cache.write("some-key", GEOMETRY)
    assert (tmp_path / "rollout_engine" / "gate" / "some-key.json").is_file()


def test_keys_follow_architecture_and_configuration_not_dtype():
    assert key() == key() == key(dtype=torch.bfloat16)
    others = [key("llama"), key(num_hidden_layers=3), key(head_dim=32), key(tie_word_embeddings=True)]
    assert len({key(), *others}) == 5


def test_keys_follow_versions_and_sources(monkeypatch):
    before = key()
    monkeypatch.setattr(gate_cache.transformers, "__version__", "0.0")
    other_version = key()
    monkeypatch.undo()
    monkeypatch.setattr(gate_cache, "_source_digest", lambda: "other sources")
    assert len({before, other_version, key()}) == 3
