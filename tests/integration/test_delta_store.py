"""Engines follow a store that is published as changes, from any version, on the same disk or over HTTP."""

import os

import pytest
import torch

import sync
from rollout_engine import LLM
from rollout_engine.base.errors import StaleVersionError
from rollout_engine.testing import tiny_checkpoint, tiny_model

OPTIONS = dict(num_kv_blocks=64, log_stats=False, skip_tokenizer_init=True)
KEY = "a key of 16 characters or more"


class Trainer:
    """Publishes a model, a few elements of which change each time."""

    def __init__(self, store):
        self.store, self.model, self.version = store, tiny_model(seed=1), 0
        self._random = torch.Generator().manual_seed(0)

    def publish(self, count=1):
        for _ in range(count):
            self.version += 1
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.view(-1)[torch.randint(weight.numel(), (3,), generator=self._random)] += 0.01
            self.manifest = sync.publish(self.store, self.model, self.version, delta=True, anchor_every=4)


@pytest.fixture
def trainer(tmp_path):
    return Trainer(tmp_path / "store")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


def has_bits_of(engine, trainer):
    updater = engine.frontend.client.driver.executor.updater
    weights = trainer.model.state_dict()
    return all(torch.equal(updater.values(name), weights[name]) for name in weights)


def test_an_engine_catches_up_from_any_version(engine, trainer):
    for count in (2, 1, 1, 2, 3, 9):
        trainer.publish(count)
        report = engine.update_weights(trainer.store)
        assert (report.version, report.digest) == (trainer.version, trainer.manifest.digest)
        assert engine.policy_version == trainer.version and has_bits_of(engine, trainer)


def test_an_engine_that_starts_late_reads_the_anchor_and_all_links(engine, trainer):
    trainer.publish(7)
    assert engine.update_weights(trainer.store).digest == trainer.manifest.digest
    assert has_bits_of(engine, trainer)


def test_a_damaged_link_gives_an_engine_the_anchor_or_an_error_that_names_it(engine, trainer):
    trainer.publish(7)
    changes = trainer.store / "versions" / "000006" / "changes"
    os.truncate(changes, changes.stat().st_size - 1)
    assert engine.update_weights(trainer.store).version == 5
    trainer.publish()
    assert engine.update_weights(trainer.store).version == 8
    trainer.publish()
    changes = trainer.store / "versions" / "000009" / "changes"
    trainer.publish()
    engine.update_weights(trainer.store)
    os.truncate(changes, changes.stat().st_size - 1)
    with pytest.raises(StaleVersionError, match=r"versions/000009/changes has .* torn.* older than version 10"):
        engine.update_weights(trainer.store)
    assert engine.policy_version == 10 and has_bits_of(engine, trainer)


def test_an_engine_without_the_disk_follows_a_copy(engine, trainer, tmp_path):
    trainer.publish(2)
    with sync.serve_store(trainer.store, key=KEY) as server:
        for count in (1, 2, 6):
            trainer.publish(count)
            sync.pull(server.url, tmp_path / "copy", key=KEY)
            assert engine.update_weights(tmp_path / "copy").digest == trainer.manifest.digest
            assert has_bits_of(engine, trainer)
