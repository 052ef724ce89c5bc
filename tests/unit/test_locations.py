"""A path that does not exist is blamed itself, wherever a model or a tokenizer is named."""

import pytest

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.locations import located
from rollout_engine.model.loading.checkpoint import find_directory
from rollout_engine.text import tokenizer
from rollout_engine.text.tokenizer import TextCodec


@pytest.mark.parametrize("name", ["/no/such/place", "./runs/none", "a/b/c", "../up", "~/nothing here", "~nobody/model"])
def test_what_can_only_be_a_path_is_said_not_to_exist(name):
    with pytest.raises(ConfigError, match=rf"^model='{name}' is a path that does not exist: .* has no '"):
        located("model", name)


def test_the_closest_name_is_offered(tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no 'checkpoint-600'\. Did you mean '.*/checkpoint-500'\?"):
        located("model", str(tmp_path / "checkpoint-600" / "inner"))


def test_a_directory_is_taken_with_its_home_and_a_hub_id_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert located("model", "~/model") == str(tmp_path / "model")
    assert located("model", "organisation/name") == "organisation/name"
    assert located("model", "name") == "name"


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer='.*config.json' is a file"):
        located("tokenizer", str(tmp_path / "config.json"))


@pytest.mark.parametrize("options,field", [({}, "model"), ({"tokenizer": "/no/tokenizer"}, "tokenizer")])
def test_a_tokenizer_names_the_option_that_was_wrong(options, field):
    config = EngineConfig.from_kwargs(model="/no/model", **options)
    with pytest.raises(ConfigError, match=rf"^{field}='/no/{field}' is a path that does not exist"):
        TextCodec.from_config(config)


def test_a_tokenizer_that_may_be_a_hub_id_is_looked_for_there_and_the_path_is_blamed_too(monkeypatch):
    def offline(name, trust_remote_code):
        raise OSError(f"no network for {name}")

    monkeypatch.setattr(tokenizer.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ConfigError, match=r"from 'runs/last': the path does not exist \(.*\); OSError: no network for"):
        TextCodec.from_pretrained("runs/last")


def test_a_model_that_does_not_exist_is_found_out_before_anything_is_fetched():
    with pytest.raises(ConfigError, match="model='/no/model' is a path that does not exist"):
        find_directory("/no/model", weights=True)
