"""Weight updates as calls, verb by verb: `collective_rpc` on engines in this process and in their own."""

import asyncio
import itertools
import socket
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import (
    LLM,
    AsyncLLM,
    ChecksumError,
    LifecycleError,
    ManifestMismatchError,
    RolloutPolicy,
    RPCError,
    SamplingParams,
    StaleVersionError,
    TransferTimeoutError,
    WeightUpdateError,
)
from rollout_engine.testing import tiny_checkpoint
from sync import make_sender, publish
from sync.manifest import WeightManifest

SEEDS = itertools.count(1)
OPTIONS = dict(num_kv_blocks=256, num_threads=1)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, logprobs=0, detokenize=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["in process", "own process"])
def engine(request, checkpoint):
    kind = LLM if request.param == "in process" else AsyncLLM
    with kind(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def call(engine):
    """`collective_rpc` as a blocking function that gives rank 0's result; no update is left open."""

    def run(method, *args, **kwargs):
        results = engine.collective_rpc(method, 60, args, kwargs)
        return (asyncio.run(results) if isinstance(engine, AsyncLLM) else results)[0]

    yield run
    run("abort_weight_update")


@pytest.fixture
def trainer(checkpoint):
    """A model with weights of its own, whatever the engine has by now."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(next(SEEDS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


@pytest.fixture
def offered(call, engine, trainer):
    """A sender in this process that offers the trainer's weights as the next version, and their manifest."""
    sender = make_sender("inproc")
    manifest = sender.offer(trainer, next_version(call, engine), metadata(call))
    yield sender, manifest
    sender.close()


def metadata(call):
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in call("get_model_metadata").items()}


def next_version(call, engine):
    """One more than any version so far."""
    engine.next_version = getattr(engine, "next_version", 0) + 1
    return engine.next_version


def generate(engine):
    if isinstance(engine, LLM):
        return engine.generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0].outputs[0]

    async def last():
        return [output async for output in engine.generate([5, 6, 7], PARAMS)][-1].outputs[0]

    return asyncio.run(last())


def assert_live(engine, call, version, before):
    """The engine samples under `version`, from other weights than `before`."""
    sample = generate(engine)
    assert [(span.policy_version, span.kv_min_version) for span in sample.version_spans] == [(version, version)]
    assert list(sample.logprobs) != list(before.logprobs)


def assert_unchanged(engine, call, digest, before):
    assert call("get_weight_digest") == digest
    after = generate(engine)
    assert list(after.logprobs) == list(before.logprobs) and after.version_spans == before.version_spans


def stage(call, sender, manifest, names=None):
    for spec in manifest.tensors:
        if names is None or spec.name in names:
            call("update_weight", spec.name, spec.dtype, spec.shape, sender.read(spec.name))


def test_without_a_group_a_transport_has_to_be_named(call, offered):
    spec = offered[1].tensors[0]
    call("begin_weight_update", offered[1])
    for method, *arguments in (["receive_weights"], ["update_weight", spec.name, spec.dtype, spec.shape]):
        with pytest.raises(WeightUpdateError, match="There is no weight group"):
            call(method, *arguments)
    with pytest.raises(WeightUpdateError, match="There is no weight group"):
        call("check_nccl_group_ready")


def test_tensors_one_by_one(engine, call, offered):
    before = generate(engine)
    sender, manifest = offered
    assert call("begin_weight_update", manifest) is True
    stage(call, sender, manifest)
    assert call("verify_weights") == manifest.digest
    assert list(generate(engine).logprobs) == list(before.logprobs)
    assert call("commit_weight_update", manifest.version) == manifest.digest
    assert_live(engine, call, manifest.version, before)
    assert call("begin_weight_update", manifest) is False  # the very same again


@pytest.mark.parametrize("transport", ["store", "shm"])
def test_receiving_by_a_transport(engine, call, trainer, tmp_path, transport):
    before = generate(engine)
    directory = tmp_path / "weights"
    directory.mkdir(mode=0o700)
    sender = make_sender(transport, directory=str(directory))
    manifest = sender.offer(trainer, next_version(call, engine), metadata(call))
    call("begin_weight_update", manifest)
    call("receive_weights", transport, {"directory": str(directory)})
    call("verify_weights")
    call("commit_weight_update", manifest.version, kv="recompute")
    sender.close()
    assert_live(engine, call, manifest.version, before)


def test_a_group_with_the_trainer(engine, call, trainer):
    before = generate(engine)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sender = make_sender("gloo", rendezvous=f"tcp://127.0.0.1:{port}", world_size=2, timeout=30.0)
    call("init_weight_update_group", "127.0.0.1", port, 1, 2, timeout=30.0)
    while not call("check_nccl_group_ready"):
        pass
    first, second = next_version(call, engine), next_version(call, engine)
    manifest = sender.offer(trainer, first, metadata(call))
    call("begin_weight_update", manifest)
    sending = threading.Thread(target=sender.send)
    sending.start()
    call("receive_weights")
    sending.join()
    call("verify_weights")
    call("commit_weight_update", first)
    assert_live(engine, call, first, before)

    weights = {spec.name: trainer.state_dict()[spec.name] * 1.5 for spec in manifest.tensors}
    whole = make_sender("inproc").offer(weights, second, metadata(call))
    call("begin_weight_update", whole)
    for spec in whole.tensors:
        sender.offer({spec.name: weights[spec.name]}, second, metadata(call))
        sending = threading.Thread(target=sender.send)
        sending.start()
        call("update_weight", spec.name, spec.dtype, spec.shape)
        sending.join()
    call("verify_weights")
    assert call("commit_weight_update", second) == whole.digest
    sender.close()


def test_a_published_store_in_one_call(engine, call, trainer, tmp_path):
    before = generate(engine)
    version = next_version(call, engine)
    manifest = publish(tmp_path / "store", trainer, version, metadata=metadata(call))
    assert call("load_weights_from_storage", str(tmp_path / "store"), num_threads=2) == manifest.digest
    assert_live(engine, call, version, before)
    assert call("load_weights_from_storage", str(tmp_path / "store")) == manifest.digest
    digest, now = call("get_weight_digest"), generate(engine)
    publish(tmp_path / "store", {"other": torch.ones(2)}, version + 1)
    with pytest.raises(ManifestMismatchError, match="other"):
        call("load_weights_from_storage", str(tmp_path / "store"))
    assert_unchanged(engine, call, digest, now)


def test_a_directory_that_is_no_store_is_refused(engine, call, tmp_path):
    digest, before = call("get_weight_digest"), generate(engine)
    (tmp_path / "meta.json").write_text("{}")
    torch.save({}, tmp_path / "weight.memmap")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(WeightUpdateError, match=str(path)):
            call("load_weights_from_storage", str(path))
    assert_unchanged(engine, call, digest, before)


def updates_of(engine):
    found = engine.get_metrics()
    return (asyncio.run(found) if asyncio.iscoroutine(found) else found).core.counters.updates


def test_updates_are_counted_however_they_end(engine, call, offered):
    sender, manifest = offered
    before = updates_of(engine)
    call("begin_weight_update", manifest)
    call("abort_weight_update")
    call("begin_weight_update", manifest)
    with pytest.raises(ChecksumError):
        call("verify_weights")
    call("abort_weight_update")
    stale = WeightManifest.of(0, manifest.tensors[1:], manifest.aliases)
    with pytest.raises(WeightUpdateError):
        call("begin_weight_update", stale)
    call("begin_weight_update", manifest)
    stage(call, sender, manifest)
    call("verify_weights")
    call("commit_weight_update", manifest.version)
    call("begin_weight_update", manifest)  # live already
    after = updates_of(engine)
    ended = {kind: count - before.failures.get(kind, 0) for kind, count in after.failures.items()}
    assert {kind: count for kind, count in ended.items() if count} == {
        "Aborted": 1,
        "ChecksumMismatch": 1,
        "ManifestMismatch": 1,
    }
    assert after.seconds.count - before.seconds.count == after.stall_seconds.count - before.stall_seconds.count == 2
    assert after.num_bytes - before.num_bytes == manifest.num_bytes
    assert 0 < after.stall_seconds.sum - before.stall_seconds.sum < after.seconds.sum - before.seconds.sum


def wait_until_free(engine, offer):
    """Begin an update as soon as no other is open."""
    while True:
        try:
            return asyncio.run(engine.collective_rpc("begin_weight_update", 60, [offer]))[0]
        except LifecycleError:
            time.sleep(0.01)


@pytest.mark.parametrize("how", ["between calls", "in a call"])
def test_an_update_ends_with_the_client_that_began_it(engine, call, trainer, tmp_path, how):
    if not isinstance(engine, AsyncLLM):
        pytest.skip("one process, one client")
    digest, before = call("get_weight_digest"), generate(engine)
    manifest = make_sender("inproc").offer(trainer, next_version(call, engine), metadata(call))
    num_left = updates_of(engine).failures.get("ClientLeft", 0)
    with AsyncLLM.connect(engine.address) as other:
        assert asyncio.run(other.collective_rpc("begin_weight_update", 60, [manifest])) == [True]
        if how == "in a call":  # which waits for a trainer that never comes
            place = {"rendezvous": f"file://{tmp_path}/nobody", "rank": 1, "world_size": 2, "timeout": 3600.0}
            waiting = asyncio.run(leaving_a_call(other, ["gloo", place]))
            assert waiting
        with pytest.raises(LifecycleError, match="UPDATING|another call is at work"):
            call("begin_weight_update", manifest)
    assert wait_until_free(engine, manifest) is True
    call("abort_weight_update")
    assert updates_of(engine).failures["ClientLeft"] == num_left + 1
    assert_unchanged(engine, call, digest, before)


@pytest.mark.parametrize("how,timeout", [("between calls", 0.2), pytest.param("in a call", 5, marks=pytest.mark.slow)])
def test_an_update_not_committed_in_time_is_aborted_and_its_client_told(engine, call, trainer, tmp_path, how, timeout):
    digest, before = call("get_weight_digest"), generate(engine)
    manifest = make_sender("inproc").offer(trainer, next_version(call, engine), metadata(call))
    num_late = updates_of(engine).failures.get("TransferTimeout", 0)
    assert call("begin_weight_update", manifest, timeout=timeout) is True
    if how == "in a call":  # which waits for a trainer that never comes
        place = {"rendezvous": f"file://{tmp_path}/nobody", "rank": 1, "world_size": 2, "timeout": 3600.0}
        with pytest.raises(WeightUpdateError):
            call("receive_weights", "gloo", place)
    while updates_of(engine).failures.get("TransferTimeout", 0) == num_late:
        time.sleep(0.01)
    late = (
        f"verify_weights: The update to version {manifest.version} was not committed within {timeout} s and is aborted"
    )
    with pytest.raises(TransferTimeoutError, match=late):
        call("verify_weights")
    with pytest.raises(LifecycleError, match="no update is open"):  # it is told once
        call("verify_weights")
    assert_unchanged(engine, call, digest, before)
    assert call("begin_weight_update", manifest) is True


def test_a_deadline_goes_with_its_update_and_with_the_engine(checkpoint, trainer):
    others, timers = threading.enumerate(), []
    with LLM(checkpoint, **OPTIONS) as engine:
        offer = make_sender("inproc").offer(trainer, 1, engine.collective_rpc("get_model_metadata")[0])
        for _ in range(2):
            engine.collective_rpc("abort_weight_update")
            engine.collective_rpc("begin_weight_update", None, [offer], {"timeout": 3600.0})
            timers += [t for t in threading.enumerate() if isinstance(t, threading.Timer) and t not in others + timers]
        timers[0].join(60)
        assert [timer.is_alive() for timer in timers] == [False, True]
    timers[1].join(60)
    assert not timers[1].is_alive()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(engine, call, offered, timeout):
    with pytest.raises(WeightUpdateError, match="timeout=.* is not allowed"):
        call("begin_weight_update", offered[1], timeout=timeout)
    assert call("begin_weight_update", offered[1]) is True


async def leaving_a_call(engine, arguments):
    """Whether `receive_weights` has begun and not returned after a second."""
    task = asyncio.create_task(engine.collective_rpc("receive_weights", None, arguments))
    done, _ = await asyncio.wait([task], timeout=1)
    task.cancel()
    return not done


def test_verbs_out_of_order_are_refused_and_change_nothing(engine, call, offered):
    digest, before = call("get_weight_digest"), generate(engine)
    sender, manifest = offered
    spec = manifest.tensors[0]
    tensor = sender.read(spec.name)
    for early in (
        ["receive_weights"],
        ["update_weight", spec.name, spec.dtype, spec.shape, tensor],
        ["verify_weights"],
        ["commit_weight_update", manifest.version],
    ):
        with pytest.raises(LifecycleError, match="no update is open"):
            call(*early)
    call("begin_weight_update", manifest)
    with pytest.raises(LifecycleError, match="^begin_weight_update: .* UPDATING"):
        call("begin_weight_update", manifest)
    with pytest.raises(LifecycleError, match="not verified"):
        call("commit_weight_update", manifest.version)
    with pytest.raises(ChecksumError, match="never arrived"):
        call("verify_weights")
    with pytest.raises(LifecycleError, match="an update is open"):
        call("get_weight_norms")
    stage(call, sender, manifest)
    call("verify_weights")
    with pytest.raises(LifecycleError, match=f"version {manifest.version + 1} is not open"):
        call("commit_weight_update", manifest.version + 1)
    call("abort_weight_update")
    call("abort_weight_update")
    assert_unchanged(engine, call, digest, before)


def test_what_does_not_fit_is_refused_and_changes_nothing(engine, call, offered):
    digest, before = call("get_weight_digest"), generate(engine)
    sender, manifest = offered
    stale = WeightManifest.of(0, manifest.tensors, manifest.aliases)
    short = WeightManifest.of(manifest.version, manifest.tensors[1:], manifest.aliases)
    for wrong, error in ((stale, StaleVersionError), (short, ManifestMismatchError)):
        with pytest.raises(error):
            call("begin_weight_update", wrong)
    with pytest.raises(RPCError, match="begin_weight_update: Expected `object`, got `str`"):
        call("begin_weight_update", "manifest")
    call("begin_weight_update", manifest)
    spec = manifest.tensors[0]
    tensor = sender.read(spec.name)
    with pytest.raises(ManifestMismatchError, match="'other' is not in the manifest"):
        call("update_weight", "other", spec.dtype, spec.shape, tensor)
    with pytest.raises(ManifestMismatchError, match="is announced as"):
        call("update_weight", spec.name, "float64", spec.shape, tensor)
    with pytest.raises(ManifestMismatchError, match="came as"):
        call("update_weight", spec.name, spec.dtype, spec.shape, tensor[:1])
    with pytest.raises(RPCError, match="Invalid enum value 'inproc'"):
        call("receive_weights", "inproc")
    stage(call, sender, manifest)
    call("update_weight", spec.name, spec.dtype, spec.shape, tensor * 2)
    with pytest.raises(ChecksumError, match=f"'{spec.name}' changed on the way"):
        call("verify_weights")
    call("abort_weight_update")
    assert_unchanged(engine, call, digest, before)


def test_an_update_that_is_open_keeps_others_out_until_it_is_aborted(engine, call, offered, trainer):
    sender, manifest = offered
    call("begin_weight_update", manifest)
    with pytest.raises(LifecycleError, match="UPDATING"):
        RolloutPolicy(engine).update_weights(trainer)
    before = generate(engine)
    call("abort_weight_update")
    assert call("begin_weight_update", manifest) is True
    stage(call, sender, manifest)
    call("verify_weights")
    call("commit_weight_update", manifest.version)
    assert_live(engine, call, manifest.version, before)
