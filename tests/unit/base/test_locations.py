"""A path that does not exist is blamed itself, wherever a model or a tokenizer is named; the hub is asked once."""

import os

import huggingface_hub
import pytest
from httpx2 import ProxyError, Request, Response
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.locations import find_directory, located
from rollout_engine.faces.frontend import Frontend
from rollout_engine.testing.models import byte_tokenizer
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_among_the_files_of_a_checkpoint_is_refused_before_it_is_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} cannot be opened: it is a named pipe, not a regular file"):
        find_directory(str(tmp_path), weights=True)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer='.*config.json' is a file"):
        located("tokenizer", str(tmp_path / "config.json"))


@pytest.mark.parametrize("options,field", [({}, "model"), ({"tokenizer": "/no/tokenizer"}, "tokenizer")])
def test_a_tokenizer_names_the_option_that_was_wrong(options, field):
    config = EngineConfig.from_kwargs(model="/no/model", **options)
    with pytest.raises(ConfigError, match=rf"^{field}='/no/{field}' is a path that does not exist"):
        TextCodec.from_config(config)


def test_a_model_that_does_not_exist_is_found_out_before_anything_is_fetched():
    with pytest.raises(ConfigError, match="model='/no/model' is a path that does not exist"):
        find_directory("/no/model", weights=True)


RESPONSE = Response(401, request=Request("GET", "https://huggingface.co"))


@pytest.fixture
def hub(monkeypatch):
    """A hub that gives or raises `hub.answer`, and notes in `hub.asked` what it was asked for."""

    class Hub:
        answer: object = LocalEntryNotFoundError("Got: ConnectError")

        def __init__(self):
            self.asked = []

        def download(self, name, allow_patterns, ignore_patterns):
            self.asked.append((name, allow_patterns, ignore_patterns))
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    made = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made


def caused_by(problem: Exception) -> Exception:
    found = LocalEntryNotFoundError("An error happened while trying to locate the files on the Hub.")
    found.__cause__ = problem
    return found


@pytest.mark.parametrize(
    "problem, reason, advice",
    [
        (OSError("no network\nand a long story"), "reached (OSError: no network), and its cache", "hf download some/m"),
        (
            ProxyError("no such proxy"),
            "the hub cannot be reached (ProxyError: no such proxy)",
            "where there is a network",
        ),
        (
            caused_by(OSError("[Errno -2] no name")),
            "reached (OSError: [Errno -2] no name)",
            "path of a local directory",
        ),
        (caused_by(OfflineModeIsEnabled("offline")), "HF_HUB_OFFLINE is set, and its cache", "unset HF_HUB_OFFLINE"),
        (IncompleteSnapshotError("3 files", "snapshots/1"), "has only a part of it", "hf download some/model"),
        (
            RepositoryNotFoundError("no", response=RESPONSE),
            "no such model, or it is private",
            "hf auth login, or HF_TOKEN",
        ),
        (GatedRepoError("no", response=RESPONSE), "asked for access", "https://huggingface.co/some/model"),
        (HFValidationError("Repo id must not have --."), "HFValidationError: Repo id must not", "Check the spelling"),
    ],
)
def test_a_hub_that_gives_nothing_is_one_error_with_the_reason_and_what_to_do(hub, problem, reason, advice):
    hub.answer = problem
    with pytest.raises(ConfigError) as caught:
        find_directory("some/model", weights=True)
    said = str(caught.value)
    assert said.startswith("model='some/model': the path does not exist (")
    assert reason in said and advice in said and "\n" not in said and ".." not in said.replace("...", "")
    assert len(hub.asked) == 1


def test_an_engine_without_its_model_asks_the_hub_once_and_starts_nothing(hub):
    started = []
    config = EngineConfig.from_kwargs(model="some/model")
    with pytest.raises(ConfigError, match=r"^model='some/model': the path does not exist .* hub cannot be reached"):
        Frontend.start(config, lambda *given: started.append(given))
    assert len(hub.asked) == 1 and not started


def test_a_tokenizer_is_read_from_what_the_hub_gave_once(hub, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    hub.answer = tmp_path
    codec = TextCodec.from_pretrained("some/tokenizer")
    assert codec.encode("a") == byte_tokenizer().encode("a") and codec.hf.name_or_path == "some/tokenizer"
    assert len(hub.asked) == 1


@pytest.mark.parametrize("weights", [True, False])
def test_the_hub_is_asked_for_no_pickles_and_for_weights_only_when_wanted(hub, tmp_path, weights):
    hub.answer = tmp_path
    assert find_directory("some/model", weights=weights) == tmp_path
    [(name, wanted, left)] = hub.asked
    assert name == "some/model"
    assert ("*.safetensors" in wanted) == weights
    assert not any("bin" in pattern or "py" in pattern for pattern in wanted)
    files = ["config.json", "original/params.json", "tokenizer/vocab.txt", "additional_chat_templates/tool.jinja"]
    kept = list(filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=left))
    assert kept == ["config.json", "additional_chat_templates/tool.jinja"]
