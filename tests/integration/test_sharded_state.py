"""Sharded states: an engine that loads one has the bits of the engine that saved it, and every other use is refused."""

import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, DirtyWeightsError, RequestError
from rollout_engine.cli import shard
from rollout_engine.cli.main import main
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.shard_files import ShardFiles
from rollout_engine.testing import tiny_checkpoint, tiny_model

needs_ranks = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
PROMPTS = [{"prompt_token_ids": [5, 9, 2, 7, 1, 8, 3, 6, 4, 11, 12, 13, 14]}, {"prompt_token_ids": [7, 8]}]
PARAMS = SamplingParams(max_tokens=12, n=2, logprobs=0, seed=5)
CUT = "model.layers.0.mlp.down_proj.weight"


@contextmanager
def running(path, **options):
    settings = dict(skip_tokenizer_init=True, num_kv_blocks=16, log_stats=False)
    engine = LLM(str(path), **(settings | options))
    try:
        yield engine
    finally:
        engine.shutdown()


def found_of(engine):
    """Samples to the bit, and the digest of all weights."""
    results = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    samples = [(list(c.token_ids), c.logprobs.tobytes()) for result in results for c in result.outputs]
    return samples, engine.collective_rpc("get_weight_digest")[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def of_one(checkpoint, tmp_path_factory):
    """The state of an engine on one process."""
    path = tmp_path_factory.mktemp("states") / "one"
    with running(checkpoint) as engine:
        engine.save_sharded_state(path)
    return path


@pytest.fixture(scope="module")
def cut_engine(checkpoint):
    with running(checkpoint, tensor_parallel_size=2) as engine:
        engine.update_weights(tiny_model("qwen3", seed=3))
        yield engine


@pytest.fixture(scope="module")
def of_two(cut_engine, tmp_path_factory):
    """The state of an engine on two ranks, after an update."""
    path = tmp_path_factory.mktemp("states") / "new" / "two"
    cut_engine.save_sharded_state(path)
    return path


@pytest.fixture
def copied(of_one, tmp_path):
    """A copy of the state of one process, to be damaged."""
    return shutil.copytree(of_one, tmp_path / "copied")


def load(path, **options):
    return load_model(EngineConfig(model=str(path), load_format="sharded", **options))


@pytest.mark.slow
@pytest.mark.parametrize("architecture, options", [
    ("qwen3", dict(tie_word_embeddings=True)), ("mixtral", {}), ("gpt2", {}), ("gpt_oss", {}),
])  # fmt: skip
def test_a_state_of_one_process_gives_the_bits_of_its_engine(tmp_path, architecture, options):
    path = tiny_checkpoint(tmp_path / "model", architecture, **options)
    with running(path, dtype="bfloat16") as engine:
        engine.update_weights(tiny_model(architecture, seed=3, **options))
        expected = found_of(engine)
        engine.save_sharded_state(tmp_path / "state")
        assert found_of(engine) == expected
    with running(tmp_path / "state", load_format="sharded") as engine:
        assert found_of(engine) == expected
        assert engine.policy_version == 0


@needs_ranks
@pytest.mark.slow
def test_a_state_of_two_ranks_gives_the_bits_of_its_engine(cut_engine, of_two, tmp_path):
    expected = found_of(cut_engine)
    with running(of_two, load_format="sharded", tensor_parallel_size=2) as engine:
        assert found_of(engine) == expected
        engine.save_sharded_state(tmp_path / "again")
    names = sorted(path.name for path in of_two.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in set(names) - {"sharded.json"}:  # which has the policy's version
        assert (tmp_path / "again" / name).read_bytes() == (of_two / name).read_bytes()


@needs_ranks
@pytest.mark.slow
def test_a_mixture_on_four_ranks_gives_the_bits_of_its_engine(tmp_path):
    path = tiny_checkpoint(tmp_path / "model", "mixtral")
    with running(path, dtype="bfloat16", tensor_parallel_size=4) as engine:
        expected = found_of(engine)
        engine.save_sharded_state(tmp_path / "state")
    with running(tmp_path / "state", load_format="sharded", tensor_parallel_size=4) as engine:
        assert found_of(engine) == expected


@pytest.mark.slow
@needs_ranks
def test_each_file_has_the_rows_of_its_rank_alone(of_two):
    parts = [load_file(of_two / f"rank-{rank}-of-2.safetensors") for rank in range(2)]
    whole = tiny_model("qwen3", seed=3).state_dict()
    assert torch.equal(torch.cat([part[CUT] for part in parts]), whole[CUT])
    assert [len(part[CUT]) for part in parts] == [32, 32]
    assert parts[0].keys() == parts[1].keys() == whole.keys()


@pytest.mark.slow
@needs_ranks
def test_a_state_of_other_ranks_is_refused(of_one, of_two):
    with pytest.raises(ConfigError, match="tensor_parallel_size=1 is not allowed: .*tensor_parallel_size=2. Give that"):
        load(of_two)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not allowed: .*tensor_parallel_size=1"):
        LLM(str(of_one), load_format="sharded", tensor_parallel_size=2, skip_tokenizer_init=True)


def test_a_state_that_is_loaded_as_a_checkpoint_is_refused_as_what_it_is(of_one):
    with pytest.raises(ConfigError, match="is a sharded state, not a checkpoint: give load_format='sharded', and the"):
        load_model(EngineConfig(model=str(of_one)))


@pytest.mark.parametrize("change", [
    lambda content: content[:20] + b"x" + content[21:],  # a name
    lambda content: content.replace(b"F32", b"F16", 1),
    lambda content: content.replace(b"]}", b"]]", 1),
])  # fmt: skip
def test_a_damaged_header_is_refused_with_what_to_do(copied, change):
    file = copied / "rank-0-of-1.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"rank-0-of-1.safetensors.* (Save|Copy) .*again"):
        load(copied)


@needs_ranks
@pytest.mark.slow
def test_a_torn_file_of_another_rank_is_refused_by_its_name_alone(of_two, tmp_path, caplog):
    path = shutil.copytree(of_two, tmp_path / "torn")
    file = path / "rank-1-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="rank-1-of-2.safetensors is cut short: tensor "):
        LLM(str(path), load_format="sharded", tensor_parallel_size=2, skip_tokenizer_init=True)
    assert [each.levelname for each in caplog.records] == ["CRITICAL"], "no warning that rank 0's model is at fault"


def test_a_missing_file_is_refused_by_its_name(copied):
    (copied / "rank-0-of-1.safetensors").unlink()
    with pytest.raises(
        ConfigError, match="rank-0-of-1.safetensors is missing: the state has files for each of its 1 ranks. Copy"
    ):
        load(copied)


def test_a_changed_byte_is_refused_by_the_name_of_its_tensor(copied):
    file = copied / "rank-0-of-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="rank-0-of-1.safetensors: '.*' does not have the digest .* Save the state"):
        load(copied)


def test_a_file_of_other_tensors_is_refused(copied):
    file = copied / "rank-0-of-1.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if name != CUT}, file)
    with pytest.raises(ConfigError, match="does not have the tensors that sharded.json lists"):
        load(copied)


def test_a_state_without_its_list_is_refused_as_not_complete(copied, checkpoint):
    (copied / "sharded.json").unlink()
    with pytest.raises(ConfigError, match="no sharded.json, so no sharded state was saved there, or not to its end"):
        load(copied)
    with pytest.raises(ConfigError, match=r"no sharded.json.* load_format='auto'"):
        load(checkpoint)


@pytest.mark.parametrize("change, match", [
    (lambda state: state.clear(), "sharded.json is damaged"),
    (lambda state: state.update(form=2), "has form 2 of sharded states; this release reads forms 1 and 2"),
    (lambda state: state["shards"][0]["tensors"][0].update(digest="0" * 32), "manifest of version 0 is damaged"),
])  # fmt: skip
def test_a_damaged_list_is_refused(copied, change, match):
    file = copied / "sharded.json"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=match):
        load(copied)


def test_the_configuration_of_another_model_is_refused(copied):
    file = copied / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match="config.json is not the one that this sharded state was saved with"):
        load(copied)


def test_weights_of_another_model_are_refused_by_name(copied, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", "qwen3", intermediate_size=80)
    with running(other) as engine:
        engine.save_sharded_state(tmp_path / "state")
    state = json.loads((tmp_path / "state/sharded.json").read_text())
    config_digest = json.loads((copied / "sharded.json").read_text())["config_digest"]
    (copied / "sharded.json").write_text(json.dumps(state | {"config_digest": config_digest}))
    with pytest.raises(
        ConfigError, match=r"rank-0-of-1.safetensors is not of this model, .* form of 6 tensors: .*down_proj"
    ):
        load(copied)


@pytest.mark.parametrize("pattern", [None, "model-rank-{rank}-part-{part}.safetensors"])
def test_files_of_a_bounded_size_hold_the_same_weights(checkpoint, of_one, tmp_path, pattern):
    with running(checkpoint) as engine:
        engine.save_sharded_state(tmp_path / "state", pattern, 20_000)
    names = [path.name for path in (tmp_path / "state").glob("*.safetensors")]
    assert len(names) > 2 and (pattern is None) == ("rank-0-of-1-part-0.safetensors" in names)
    digests = [json.loads((path / "sharded.json").read_text())["shards"][0] for path in (of_one, tmp_path / "state")]
    assert sorted(spec["digest"] for spec in digests[0]["tensors"]) == sorted(
        s["digest"] for s in digests[1]["tensors"]
    )
    load(tmp_path / "state")
    (tmp_path / "state" / names[0]).unlink()
    with pytest.raises(ConfigError, match="is missing: the state has files for each of its 1 ranks"):
        load(tmp_path / "state")


@pytest.mark.slow
@needs_ranks
def test_ranks_write_files_of_a_bounded_size(cut_engine, tmp_path):
    cut_engine.save_sharded_state(tmp_path / "state", max_size=20_000)
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {f"rank-{rank}-of-2-part-1.safetensors" for rank in range(2)} <= names
    with running(tmp_path / "state", load_format="sharded", tensor_parallel_size=2) as engine:
        assert found_of(engine) == found_of(cut_engine)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("part-{part}.safetensors", None), "pattern"),
        (("rank-{rank}.safetensors", 1000), "pattern"),
        (("rank-{rank}", None), "pattern"),
        (("a/{rank}.safetensors", None), "pattern"),
        (("{rank}-{size}.safetensors", None), "pattern"),
        ((None, 0), "max_size"),
    ],
)
def test_patterns_that_give_two_files_one_name_are_refused(arguments, field):
    with pytest.raises(RequestError, match=f"save_sharded_state: {field}=") as caught:
        ShardFiles.of(*arguments, "save_sharded_state")
    assert caught.value.field == field


def test_another_dtype_is_refused(of_one):
    with pytest.raises(ConfigError, match="dtype='bfloat16' is not allowed: .* an engine of dtype='float32'"):
        load(of_one, dtype="bfloat16")


@needs_ranks
def test_nothing_is_written_over(cut_engine, of_two, tmp_path):
    before = (of_two / "sharded.json").read_bytes()
    with pytest.raises(
        RequestError, match="save_sharded_state: path=.* not there yet, or is empty. Nothing is written over: give"
    ):
        cut_engine.save_sharded_state(of_two)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="path="):
        cut_engine.save_sharded_state(tmp_path / "file")
    with pytest.raises(RequestError, match="path=3 is not allowed: must be the path of a directory"):
        cut_engine.save_sharded_state(3)
    assert (of_two / "sharded.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    cut_engine.save_sharded_state(tmp_path / "empty")
    assert (tmp_path / "empty" / "sharded.json").is_file()


def test_the_command_says_how_to_load_and_refuses_a_taken_directory_at_once(checkpoint, tmp_path, capsys, monkeypatch):
    arguments = ["shard", str(checkpoint), str(tmp_path / "state")]
    assert main(arguments) == 0
    assert "state: load it with load_format=sharded tensor_parallel_size=1" in capsys.readouterr().out
    load(tmp_path / "state")
    monkeypatch.delattr(shard, "LLM")  # nothing is loaded before it refuses
    assert main(arguments) == 2
    assert "Nothing is written over: give another, or remove it first." in capsys.readouterr().err


@needs_ranks
def test_a_rank_that_cannot_write_leaves_nothing(cut_engine, tmp_path, monkeypatch):
    def take_the_name_of_its_file(files, to):
        (to / "rank-1-of-2.safetensors").write_text("")

    monkeypatch.setattr("rollout_engine.model.loading.sharded_state._copy_files", take_the_name_of_its_file)
    with pytest.raises(RequestError, match=r"path=.* can be written. FileExistsError.*rank-1-of-2.safetensors"):
        cut_engine.save_sharded_state(tmp_path / "state")
    assert not list(tmp_path.iterdir())
    assert found_of(cut_engine)


def test_a_model_whose_files_have_changed_since_is_refused(tmp_path):
    path = tiny_checkpoint(tmp_path / "model", "qwen3")
    with running(path) as engine:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
        with pytest.raises(RequestError, match="config.json has changed since the model was loaded"):
            engine.save_sharded_state(tmp_path / "state")
        engine.sleep(level=2)
        engine.wake_up()
        with pytest.raises(DirtyWeightsError, match="save_sharded_state: the live weights are incomplete: sleep"):
            engine.save_sharded_state(tmp_path / "state")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
