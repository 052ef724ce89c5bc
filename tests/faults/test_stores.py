"""A store or checkpoint that cannot be trusted is refused by the name of what is wrong, and the engine is as before."""

import os
import threading

import pytest

import sync
from rollout_engine import LLM, errors
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.stores import CHECKPOINTS, STORES

SECONDS = 60
"""For an update that is refused at once."""
NEEDS_ROOT = [name for name in STORES if name.startswith("another user's")]


@pytest.fixture(scope="module")
def weights():
    return tiny_model(seed=1).state_dict()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = tmp_path_factory.mktemp("engine")
    tiny_checkpoint(model)
    with LLM(model, num_kv_blocks=16, log_stats=False, skip_tokenizer_init=True) as llm:
        yield llm


def state(engine):
    driver = engine.frontend.client.driver
    return driver.core.lifecycle.state, engine.policy_version, driver.executor.updater.digest()


def update_error(engine, source):
    """What an update from `source` raises."""
    raised = []

    def update():
        try:
            engine.update_weights(source)
        except BaseException as problem:
            raised.append(problem)

    updating = threading.Thread(target=update, daemon=True)
    updating.start()
    updating.join(SECONDS)
    assert not updating.is_alive(), "the update waits for ever"
    return raised[0] if raised else None


@pytest.fixture
def bad_store(request, tmp_path, weights):
    if request.param in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    sync.publish(tmp_path / "store", weights, 1)
    STORES[request.param].tamper(tmp_path / "store")
    return tmp_path / "store", STORES[request.param].named


@pytest.mark.quick(4)
@pytest.mark.parametrize("bad_store", STORES, indirect=True)
def test_a_bad_store_is_refused_by_name_and_changes_nothing(engine, bad_store):
    store, named = bad_store
    before = state(engine)
    problem = update_error(engine, store)
    assert isinstance(problem, errors.WeightUpdateError), repr(problem)
    assert named in str(problem) and len(str(problem)) < 2000
    assert state(engine) == before
    with pytest.raises(sync.SyncError):
        sync.open_current(store)


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_bad_checkpoint_is_refused_by_name_and_changes_nothing(engine, tmp_path, name):
    tiny_checkpoint(tmp_path / "checkpoint", seed=1)
    CHECKPOINTS[name].tamper(tmp_path / "checkpoint")
    before = state(engine)
    problem = update_error(engine, tmp_path / "checkpoint")
    assert isinstance(problem, errors.WeightUpdateError), repr(problem)
    assert CHECKPOINTS[name].named in str(problem) and len(str(problem)) < 2000
    assert state(engine) == before


def test_good_ones_are_taken(engine, tmp_path, weights):
    sync.publish(tmp_path / "store", weights, 1)
    tiny_checkpoint(tmp_path / "checkpoint", seed=2)
    assert engine.update_weights(tmp_path / "store").version == 1
    assert engine.update_weights(tmp_path / "checkpoint").version == 2


PARTS = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_with_a_pipe_in_it_is_not_loaded(tmp_path, part):
    tiny_checkpoint(tmp_path)
    (tmp_path / part).unlink(missing_ok=True)
    os.mkfifo(tmp_path / part)
    with pytest.raises(errors.ConfigError, match=rf"{part} cannot be opened: it is a named pipe, not a regular file"):
        LLM(tmp_path, num_kv_blocks=16, skip_tokenizer_init=True)
