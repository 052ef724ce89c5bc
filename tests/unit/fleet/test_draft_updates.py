"""Weights of the draft model over a fleet of fake replicas, which note what they are given."""

import time
from pathlib import Path

import pytest

from rollout_engine.base.errors import RetryableError, StaleVersionError, TransferTimeoutError
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine.calls import CallFuture
from sync.checkpoint_names import CheckpointNames
from tests.unit.fleet.fake_fleet import FakeClient, make_service

PROMPT = [5, 6, 7, 8]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)


class DraftingClient(FakeClient):
    """The client of a replica with a draft model, whose weights are the text of a file; `fails` names a method."""

    version, weights, staged, fails = 0, "of the checkpoint", None, None

    def call(self, name, arguments):
        if name != "get_live_weights":
            return super().call(name, arguments)
        assert arguments == {"draft": True}, "the policy's weights are left alone"
        answer = CallFuture()
        answer.succeed((self.version, {}, CheckpointNames()))
        return answer

    def stage_weights(self, path, version, options):
        assert options.draft, "the policy's weights are left alone"
        if version < self.version and not options.reset_version:
            raise StaleVersionError("it is older")
        self.fail("stage_weights")
        self.staged = version, Path(path).read_text()
        return self.staged

    def commit_weights(self, timeout):
        self.fail("commit_weights")
        (self.version, self.weights), self.staged = self.staged, None
        return UpdateReport(self.version, self.weights, 1, 1, 0.0, 0.0, 0)

    def drop_staged_weights(self):
        self.staged = None

    def fail(self, method):
        if self.fails == method:
            self.fails = None
            raise TransferTimeoutError("a failure of the test")


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr("tests.unit.fleet.fake_fleet.FakeClient", DraftingClient)
    service, provider = make_service()
    with service:
        yield service, provider


@pytest.fixture
def clients(provider):
    """The clients of both replicas at this moment."""
    return lambda: [provider.replicas[index].client for index in (0, 1)]


@pytest.fixture
def push(service, tmp_path):
    """push(text, **options): update the draft model to the weights `text`."""

    def push(text, **options):
        path = tmp_path / text
        path.write_text(text)
        return service.update_weights(path, draft=True, **options)

    return push


def eventually(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def test_every_replica_has_the_draft_models_new_weights_and_the_policys_version_stays(service, clients, push):
    reports = [push("first"), push("second"), push("fifth", version=5)]
    assert [report.version for report in reports] == [1, 2, 5] and list(reports[0].replicas) == [0, 1]
    assert [(client.version, client.weights) for client in clients()] == [(5, "fifth")] * 2
    assert service.policy_version == 0
    with pytest.raises(StaleVersionError):
        push("third", version=3)
    assert push("third", version=3, reset_version=True).version == 3
    assert push("more").version == 4


def test_a_fleet_that_joins_replicas_counts_from_what_they_have(clients, push):
    for client in clients():
        client.version = 7
    assert push("first").version == 8


@pytest.mark.parametrize("method", ["stage_weights", "commit_weights"])
def test_a_replica_that_misses_them_serves_on_and_is_given_them_beside(service, clients, push, method):
    late = clients()[1]
    late.fails = method
    report = push("first")
    assert list(report.replicas) == [0], "the report says who has them"
    assert [replica.state for replica in service.frontend.client.replicas()] == ["SYNCED"] * 2
    eventually(lambda: late.weights == "first")
    assert service.generate([PROMPT], SHORT, replica_index=1, use_tqdm=False)[0].outputs[0].token_ids


def test_a_replica_that_cannot_take_them_drafts_by_older_ones(service, clients, push, monkeypatch, caplog):
    def never(path, version, options):
        raise TransferTimeoutError("a failure of the test")

    with monkeypatch.context() as patch:
        patch.setattr(clients()[1], "stage_weights", never)
        push("first")
        eventually(lambda: "drafts by older weights until the next" in caplog.text)
    assert [client.weights for client in clients()] == ["first", "of the checkpoint"]
    assert service.generate([PROMPT], SHORT, replica_index=1, use_tqdm=False)[0].outputs[0].token_ids
    assert list(push("second").replicas) == [0, 1]


def test_a_replica_that_is_started_anew_is_given_them(service, provider, clients, push):
    push("first")
    dead = clients()[1]
    provider.replicas[1].kill()
    eventually(lambda: clients()[1] is not dead and clients()[1].weights == "first")
    assert clients()[1].version == 1 and service.policy_version == 0


def test_where_no_replica_takes_them_the_old_ones_draft_on(service, clients, push):
    push("first")
    for client in clients():
        client.fails = "commit_weights"
    with pytest.raises(TransferTimeoutError, match="of the test"):
        push("second")
    assert [(client.weights, client.staged) for client in clients()] == [("first", None)] * 2
    assert [replica.state for replica in service.frontend.client.replicas()] == ["SYNCED"] * 2


def test_other_weights_at_the_same_path_are_not_given(provider, clients, push, tmp_path, caplog):
    push("first")
    (tmp_path / "first").write_text("something else")
    provider.replicas[1].kill()
    eventually(lambda: "holds other weights than those of version 1" in caplog.text)
    assert clients()[1].weights == "of the checkpoint"


def test_without_a_replica_they_are_to_be_sent_again(service, provider, push):
    provider.starts = False
    for replica in provider.replicas.values():
        replica.kill()
    eventually(lambda: not service.frontend.client._members)
    with pytest.raises(RetryableError, match="call it again"):
        push("first")
