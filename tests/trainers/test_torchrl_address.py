"""Policies and weight synchronisation of TorchRL's that travel to other processes as the address of an engine."""

import copy
import json
import multiprocessing
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("torchrl.modules.llm")

from envs_adapters.trainers.torchrl import EnginePolicy, EngineWeightSyncScheme  # noqa: E402
from rollout_engine import AsyncLLM, EngineDeadError, RolloutPolicy, RolloutService  # noqa: E402
from rollout_engine.base.errors import ConfigError, ManifestMismatchError, WeightUpdateError  # noqa: E402
from rollout_engine.testing import tiny_checkpoint, tiny_model  # noqa: E402
from tests.ray.conftest import place, start_command  # noqa: E402, F401
from tests.trainers.torchrl_runs import ragged, texts  # noqa: E402

# TorchRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
GREEDY = {"max_new_tokens": 6, "temperature": 0}
OPTIONS = dict(dtype="float32", num_kv_blocks=256, max_num_seqs=16, num_threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def owner(checkpoint):
    """The engine in a process of its own, which others reach by its address."""
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


def answers(policy):
    rows = policy(texts("one", "two plus two"))
    return [row.tolist() for row in ragged(rows, "tokens", "full")]


def answers_elsewhere(pickled, queue):
    """In a process that has nothing but these bytes."""
    policy = pickle.loads(pickled)
    queue.put((answers(policy), policy.model.policy_version))
    policy.close()


@pytest.mark.parametrize("made_with", ["engine", "address"])
def test_a_pickled_policy_is_an_address_and_generates_in_another_process(owner, made_with):
    policy = EnginePolicy(owner if made_with == "engine" else owner.address, input_mode="text", generate_kwargs=GREEDY)
    pickled = pickle.dumps(policy)
    assert owner.address.encode() in pickled and len(pickled) < 2_000
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=answers_elsewhere, args=(pickled, queue))
    process.start()
    try:
        assert queue.get(timeout=120) == (answers(policy), owner.policy_version)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
    assert policy.model.is_paused() is False
    policy.close()
    assert owner.errored is False


def test_a_core_on_tcp_is_found_with_the_key_file(checkpoint, tmp_path):
    keys = tmp_path / "keys"
    command = ["core", str(checkpoint), "--listen", "tcp://127.0.0.1:0", "--key-file", str(keys), "num_threads=1"]
    with subprocess.Popen([sys.executable, "-m", "rollout_engine", *command], stdout=subprocess.PIPE) as process:
        try:
            address = process.stdout.readline().decode().strip()
            policy = EnginePolicy(address, key_file=keys, input_mode="text", generate_kwargs=GREEDY)
            pickled = pickle.dumps(policy)
            assert str(keys).encode() in pickled and keys.read_bytes() not in pickled
            again = pickle.loads(pickled)
            assert answers(again) == answers(policy)
            without = EnginePolicy(AsyncLLM.connect(address, key_file=keys))
            with pytest.raises(ConfigError, match="key_file="):
                pickle.dumps(without)
            for each in (policy, again, without):
                each.model.shutdown()
        finally:
            process.kill()


def test_what_cannot_be_reached_by_an_address_is_not_pickled(checkpoint, owner):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        for made in (EnginePolicy(policy), EngineWeightSyncScheme(policy)):
            with pytest.raises(ConfigError, match="in this process.*AsyncLLM.*rollout-engine core"):
                pickle.dumps(made)
    with pytest.raises(ConfigError, match="seed=3"):
        pickle.dumps(EnginePolicy(owner, seed=3))
    with pytest.raises(EngineDeadError):
        EnginePolicy("/no/such/core")


def test_a_fleet_generates_and_is_not_pickled(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as one, AsyncLLM(checkpoint, **OPTIONS) as other:
        expected = answers(EnginePolicy(one, input_mode="text", generate_kwargs=GREEDY))
        fleet = EnginePolicy([one.address, other.address], input_mode="text", generate_kwargs=GREEDY)
        assert answers(fleet) == expected
        with pytest.raises(ConfigError, match="several replicas"):
            pickle.dumps(fleet)
        fleet.close()
    with RolloutService.from_pretrained(checkpoint, num_replicas=1, **OPTIONS) as service:
        policy = EnginePolicy(service, input_mode="text", generate_kwargs=GREEDY)
        assert answers(policy) == expected
        with pytest.raises(ConfigError, match="several replicas"):
            pickle.dumps(policy)


def test_a_copy_in_the_same_process_shares_the_connection(owner):
    policy = EnginePolicy(owner, input_mode="text", generate_kwargs=GREEDY)
    other = copy.deepcopy(policy)
    assert other is not policy and other.model is policy.model and answers(other) == answers(policy)


def test_a_push_reaches_every_policy_of_the_engine_and_is_all_or_nothing(owner):
    near = EnginePolicy(owner, input_mode="text", generate_kwargs=GREEDY)
    far = EnginePolicy(owner.address, input_mode="text", generate_kwargs=GREEDY)
    before, first = answers(far), owner.policy_version
    trained = tiny_model(seed=7)
    sync = pickle.loads(pickle.dumps(EngineWeightSyncScheme(near)))
    with pytest.raises(RuntimeError, match="initialized"):
        sync.send(trained)
    sync.init_on_sender(model_id="policy")
    sync.connect()
    with pytest.raises(ConfigError, match="no weights to send"):
        sync.send()
    sync.send(trained)
    assert (sync.policy_version, first) == (first + 1, first)
    assert answers(near) == answers(far) != before
    after = answers(far)
    broken = dict(tiny_model(seed=8).state_dict())
    name = next(iter(broken))
    with pytest.raises(ManifestMismatchError):
        sync.send({key: value for key, value in broken.items() if key != name})
    with pytest.raises(WeightUpdateError):
        sync.send(broken | {name: broken[name] * float("nan")})
    assert answers(near) == answers(far) == after and sync.policy_version == first + 1
    far.close()


def test_sources_that_hide_what_they_are_get_refused(owner):
    from tensordict import TensorDict

    sync = EngineWeightSyncScheme(owner)
    sync.init_on_sender(model_id="policy")
    sync.connect()
    with pytest.raises(ConfigError, match="Give the model itself"):
        sync.send(TensorDict.from_module(tiny_model()))
    with pytest.raises(ConfigError, match="model=3"):
        EngineWeightSyncScheme(owner).init_on_sender(model_id="policy", model=3)


def test_a_receiver_has_nothing_to_do(owner):
    sync = EngineWeightSyncScheme(owner)
    sync.init_on_receiver(model_id="policy")
    sync.connect(worker_idx=0)
    assert sync.receive(timeout=0.0) is None


@pytest.mark.slow
def test_rays_collector_ships_the_policy_as_an_address(checkpoint, place, owner):  # noqa: F811
    first = owner.policy_version
    with start_command(
        place, [sys.executable, "-m", "tests.trainers.torchrl_ray", str(checkpoint), owner.address]
    ) as program:
        output, _ = program.communicate(timeout=600)
    assert program.returncode == 0, output
    [seen] = [json.loads(line) for line in output.splitlines() if line.startswith("[{")]
    assert seen == [{"rows": 8, "versions": [-1, first]}, {"rows": 8, "versions": [-1, first + 1]}]
