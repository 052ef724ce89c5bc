"""An update sends and stages only the tensors that changed, and ends in the same bits as one that sends all."""

import random

import pytest
import torch

import sync
from rollout_engine import LLM, errors
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.testing import tiny_model
from rollout_engine.weights import known_weights
from rollout_engine.weights.update import apply_update
from tests.unit.weights.conftest import Packed

BYTES = {"embed": 80, "q": 64, "k": 32, "steps": 8}


@pytest.fixture(autouse=True)
def any_share(monkeypatch):
    """However little has not changed, it is left."""
    monkeypatch.setattr(known_weights, "_LEAST_UNCHANGED", 0.0)


def total(*names):
    return sum(BYTES[name] for name in names)


def test_only_tensors_that_changed_are_sent(engine, make_engine, weights):
    first = engine.update(weights())
    assert first.num_bytes_sent == first.num_bytes == total(*BYTES)
    for changed in (["q"], ["embed", "k"], ["steps"], []):
        source = weights() | {name: weights(40)[name] for name in changed}
        report = engine.update(source)
        whole = make_engine()
        assert report.digest == whole.update(source).digest and engine.updater.digest() == whole.updater.digest()
        assert all(torch.equal(engine.live[name], whole.live[name]) for name in engine.live)
        assert report.num_bytes == total(*BYTES)
        assert engine.update(weights()).num_bytes_sent == report.num_bytes_sent == total(*changed)


def test_where_most_has_changed_all_is_sent(engine, weights, monkeypatch):
    monkeypatch.undo()
    engine.update(weights())
    most = weights() | {name: weights(40)[name] for name in ("embed", "q")}
    assert engine.update(most).num_bytes_sent == total(*BYTES)
    assert engine.update(most | {"k": weights()["k"] + 1}).num_bytes_sent == total("k")


def test_without_delta_all_is_sent_again(engine, weights):
    engine.update(weights())
    assert engine.update(weights(), delta=False).num_bytes_sent == total(*BYTES)


def test_after_other_names_only_what_is_known_by_its_name_is_left(engine, weights):
    engine.update(weights())
    part = weights()
    fused = {"qk": torch.cat([part["q"], part["k"]]), "head": part["embed"], "steps": part["steps"]}
    report = engine.update(fused)
    assert report.num_bytes_sent == total("q", "k", "embed") and report.num_bytes == total(*BYTES)
    assert engine.update(fused).num_bytes_sent == 0


def test_a_cast_that_gives_the_same_bits_is_no_change(make_engine, weights):
    engine = make_engine(dtype=torch.bfloat16)
    masters = weights()
    engine.update(masters)
    moved = {name: t * (1 + 2**-20) if t.is_floating_point() else t for name, t in masters.items()}
    assert not torch.equal(moved["q"], masters["q"]) and torch.equal(moved["q"].bfloat16(), masters["q"].bfloat16())
    report = engine.update(moved)
    assert report.num_bytes_sent < report.num_bytes / 2


@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_after_a_failure_in_place_all_is_sent(engine, weights, staging):
    engine.update(weights())
    nan = weights(q=torch.full((4, 4), float("nan")))
    with pytest.raises(errors.WeightUpdateError):
        engine.update(nan, staging=staging)
    sent = engine.update(weights()).num_bytes_sent
    assert sent == (0 if staging == "shadow" else total(*BYTES))


@pytest.mark.parametrize("before", ["partial", "inplace", "forgotten"])
def test_where_live_values_are_not_known_all_is_sent(engine, weights, before):
    engine.update(weights())
    if before == "partial":
        engine.update({"q": weights(50)["q"]}, partial=True)
    elif before == "forgotten":
        engine.updater.release(forget=True)
    assert engine.update(weights(), staging="inplace" if before == "inplace" else "auto").num_bytes_sent == total(
        *BYTES
    )


def test_values_that_are_not_finite_are_never_left_as_they_are(engine, weights):
    nan = weights(q=torch.full((4, 4), float("nan")))
    engine.update(nan, allow_nonfinite=True)
    with pytest.raises(errors.ChecksumError, match="'q' has values that are NaN"):
        engine.update(nan)
    assert engine.update(nan, allow_nonfinite=True).num_bytes_sent == total("q")


def test_a_delta_that_fails_leaves_the_old_weights(engine, weights, monkeypatch):
    engine.update(weights())
    before, live = engine.state(), {name: tensor.clone() for name, tensor in engine.live.items()}

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Packed, "pack_changed", fail)
        with pytest.raises(MemoryError):
            engine.update(weights(q=weights(40)["q"]))
    assert engine.state() == before and all(torch.equal(engine.live[name], live[name]) for name in live)
    assert engine.update(weights() | {"k": weights(40)["k"]}).num_bytes_sent == total("k")


@pytest.mark.parametrize("transport", ["store", "shm"])
def test_other_processes_send_what_changed(engine, make_engine, weights, steps, tmp_path, transport):
    sender = sync.make_sender(transport, directory=tmp_path / "meeting")
    receiver = sync.make_receiver(transport, directory=tmp_path / "meeting")
    before: list[str] = []
    for version, changed in enumerate([list(BYTES), ["q"], ["embed", "steps"], []], start=1):
        source = weights() | {name: weights(40 + version)[name] for name in changed}
        manifest = sender.offer(source, version, engine.updater.metadata())
        report = apply_update(engine.updater, manifest, receiver, steps, UpdateOptions())
        whole = make_engine()
        assert report.digest == whole.update(source).digest and engine.updater.digest() == whole.updater.digest()
        back = [name for name in before if name not in changed]
        assert report.num_bytes_sent == total(*changed, *back)
        before = changed
    sender.close()


@pytest.mark.parametrize(
    "model_type,dtype",
    [
        ("qwen3", "bfloat16"),
        pytest.param("qwen2", "float32", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "float32", marks=pytest.mark.slow),
    ],
)
def test_random_sequences_of_deltas_end_as_whole_updates(tmp_path, model_type, dtype):
    trainer = tiny_model(model_type)
    trainer.save_pretrained(tmp_path)
    choose = random.Random(3)
    options = dict(dtype=dtype, skip_tokenizer_init=True, num_kv_blocks=16, num_threads=1)
    with LLM(str(tmp_path), **options) as one, LLM(str(tmp_path), **options) as other:
        one.update_weights(trainer)
        for _ in range(6):
            parameters = list(trainer.parameters())
            for parameter in choose.sample(parameters, choose.randint(1, 4)):
                parameter.data.view(-1)[choose.randrange(parameter.numel())] += 0.5
            report = one.update_weights(trainer)
            whole = other.update_weights(trainer, delta=False)
            assert 0 < report.num_bytes_sent < report.num_bytes == whole.num_bytes_sent
            assert report.digest == whole.digest
            prompt = [{"prompt_token_ids": [5, 6, 7, 8]}]
            assert one.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids == (
                other.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids
            )
            assert one.score([[5, 6]], [[7, 8]])[0].tolist() == other.score([[5, 6]], [[7, 8]])[0].tolist()
        assert one.collective_rpc("get_weight_digest") == other.collective_rpc("get_weight_digest")
