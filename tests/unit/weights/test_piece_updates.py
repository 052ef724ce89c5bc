"""An update brings only the pieces that changed, and ends in the same bits as one that brings everything."""

import random

import pytest
import torch

import sync
from rollout_engine import LLM, errors
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.model.packing import changed_panels
from rollout_engine.testing import tiny_model
from rollout_engine.weights import known_weights
from rollout_engine.weights.update import apply_update
from tests.small_pieces import small_pieces

TRANSPORTS = ["inproc", "shm", "store"]
TIED = {"tie_word_embeddings": True}
PADDED = TIED | {"hidden_size": 56, "intermediate_size": 75, "vocab_size": 101}
MODELS = [
    pytest.param("qwen3", "bfloat16", TIED, "own", "copied"),
    pytest.param("qwen3_moe", "bfloat16", {"moe_intermediate_size": 41}, "own", "swapped", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "float32", {"moe_intermediate_size": 41}, "own", "copied", marks=pytest.mark.slow),
    pytest.param("qwen3", "float32", PADDED, "own", "copied", marks=pytest.mark.slow),
    pytest.param("qwen3", "bfloat16", PADDED, "own", "swapped", marks=pytest.mark.slow),
    pytest.param("qwen2", "float32", {}, "library", "copied", marks=pytest.mark.slow),
    pytest.param("qwen3", "bfloat16", TIED, "library", "copied", marks=pytest.mark.slow),
]
"""Model, dtype, sizes, whose products, and how changed panels go live."""


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """Pieces of 64 bytes; however little has not changed, it is left."""
    monkeypatch.setattr(known_weights, "_LEAST_UNCHANGED", 0.0)
    with small_pieces() as num_bytes:
        yield num_bytes


def big(seed):
    """Tensors of many pieces, the last one short; ties, views of one buffer and integers."""
    generator = torch.Generator().manual_seed(seed)
    qk = torch.randn(40, 10, generator=generator)
    return {"embed": torch.randn(30, 7, generator=generator), "q": qk[:25], "k": qk[25:], "steps": torch.arange(99)}


def ends(transport, directory):
    sender = sync.make_sender(transport, **({} if transport == "inproc" else {"directory": directory}))
    options = {"sender": sender} if transport == "inproc" else {"directory": directory}
    return sender, sync.make_receiver(transport, **options)


def make_live(dtype=torch.float32):
    qk, embed = torch.zeros(40, 10, dtype=dtype), torch.zeros(30, 7, dtype=dtype)
    return {"embed": embed, "head": embed, "q": qk[:25], "k": qk[25:], "steps": torch.zeros(99, dtype=torch.int64)}


def change_pieces(tensors, count, choose, num_bytes):
    """Change an element in each of `count` pieces of the tensors; returns the bytes of these pieces."""
    pieces = [(t, first) for t in tensors for first in range(0, t.numel(), num_bytes // t.itemsize)]
    changed = choose.sample(pieces, count)
    for tensor, first in changed:
        last = min(first + num_bytes // tensor.itemsize, tensor.numel())
        tensor.view(-1)[choose.randrange(first, last)] += 1
    return sum(min(num_bytes, t.nbytes - first * t.itemsize) for t, first in changed)


@pytest.mark.quick(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_pieces_that_changed_are_taken(make_updater, steps, tmp_path, pieces, transport, dtype):
    live, choose = make_live(dtype), random.Random(1)
    updater = make_updater(live, [["embed", "head"]])
    sender, receiver = ends(transport, tmp_path / "meeting")
    source = {name: t.to(dtype) if t.is_floating_point() else t for name, t in big(1).items()}
    for version in range(1, 12):
        changed = change_pieces(list(source.values()), version, choose, pieces) if version > 1 else None
        manifest = sender.offer(source, version, updater.metadata())
        report = apply_update(updater, manifest, receiver, steps, UpdateOptions())
        assert report.num_bytes_sent == (report.num_bytes if changed is None else changed)
        assert all(torch.equal(live[name], source[name]) for name in source) and live["head"] is live["embed"]
        assert report.digest == manifest.digest
    sender.close()


def test_pieces_are_not_told_apart_where_only_the_digest_of_the_whole_is_known(make_updater, steps):
    updater, source = make_updater(make_live(), [["embed", "head"]]), big(1)
    sender, receiver = ends("inproc", None)
    for version in (1, 2):
        source["q"][0, 0] += 1
        manifest = sender.offer(source, version, updater.metadata())
        bare = [sync.manifest.TensorSpec(s.name, s.shape, s.dtype, s.digest) for s in manifest.tensors]
        bare_manifest = sync.manifest.WeightManifest.of(version, bare, manifest.aliases)
        report = apply_update(updater, bare_manifest, receiver, steps, UpdateOptions())
    assert report.num_bytes_sent == source["q"].nbytes
    source["q"][0, 0] += 1
    report = apply_update(updater, sender.offer(source, 3, updater.metadata()), receiver, steps, UpdateOptions())
    assert report.num_bytes_sent == source["q"].nbytes


def test_a_piece_that_is_not_what_the_manifest_says_is_refused(make_updater, steps):
    live, source = make_live(), big(1)
    updater = make_updater(live, [["embed", "head"]])
    sender, receiver = ends("inproc", None)
    apply_update(updater, sender.offer(source, 1, updater.metadata()), receiver, steps, UpdateOptions())
    before = {name: tensor.clone() for name, tensor in live.items()}
    source["q"][0, 0] += 1
    manifest = sender.offer(source, 2, updater.metadata())
    source["q"][0, 1] += 1  # after its digest was made: this piece is torn
    source["k"][0, 1] += 1  # not looked at, for it is not taken
    with pytest.raises(errors.ChecksumError, match="'q' changed on the way"):
        apply_update(updater, manifest, receiver, steps, UpdateOptions())
    assert updater.version == 1 and all(torch.equal(live[name], before[name]) for name in live)
    report = apply_update(updater, sender.offer(source, 2, updater.metadata()), receiver, steps, UpdateOptions())
    assert report.num_bytes_sent == 2 * 64 and torch.equal(live["k"], source["k"])


def test_pieces_with_nan_are_refused(make_updater, steps):
    updater, source = make_updater(make_live(), [["embed", "head"]]), big(1)
    sender, receiver = ends("inproc", None)
    apply_update(updater, sender.offer(source, 1, updater.metadata()), receiver, steps, UpdateOptions())
    source["q"][20, 3] = float("nan")
    manifest = sender.offer(source, 2, updater.metadata())
    with pytest.raises(errors.ChecksumError, match="'q' has values that are NaN"):
        apply_update(updater, manifest, receiver, steps, UpdateOptions())
    report = apply_update(updater, manifest, receiver, steps, UpdateOptions(allow_nonfinite=True))
    assert report.num_bytes_sent == 64
    source["q"][0, 0] += 1
    manifest = sender.offer(source, 3, updater.metadata())
    with pytest.raises(errors.ChecksumError, match="'q' has values that are NaN"):  # though these are another piece
        apply_update(updater, manifest, receiver, steps, UpdateOptions())


def test_a_commit_that_copies_other_bytes_is_noticed(make_updater, steps, monkeypatch):
    updater, source = make_updater(make_live(), [["embed", "head"]]), big(1)
    sender, receiver = ends("inproc", None)
    apply_update(updater, sender.offer(source, 1, updater.metadata()), receiver, steps, UpdateOptions())
    source["q"][0, 0] += 1
    monkeypatch.setattr(type(updater.weights._shadow), "commit", lambda shadow: None)
    with pytest.raises(errors.DirtyWeightsError, match="not the ones that were staged"):
        apply_update(updater, sender.offer(source, 2, updater.metadata()), receiver, steps, UpdateOptions())
    monkeypatch.undo()
    report = apply_update(updater, sender.offer(source, 2, updater.metadata()), receiver, steps, UpdateOptions())
    assert report.num_bytes_sent == report.num_bytes and not updater.dirty


@pytest.mark.parametrize("model_type,dtype,changes,products,commit", MODELS)
def test_random_pieces_end_in_the_bits_of_a_whole_update(
    request, monkeypatch, tmp_path, pieces, model_type, dtype, changes, products, commit
):
    if products == "own":
        request.getfixturevalue("own_products")
    monkeypatch.setattr(changed_panels, "COPIED_BYTES", 1 << 40 if commit == "copied" else -1)
    monkeypatch.setattr(changed_panels, "COPIED_SHARE", 0)
    trainer = tiny_model(model_type, **changes).to(getattr(torch, dtype))
    trainer.save_pretrained(tmp_path)
    choose = random.Random(3)
    options = dict(dtype=dtype, skip_tokenizer_init=True, num_kv_blocks=16, num_threads=1)
    prompt = [{"prompt_token_ids": [5, 6, 7, 8]}]
    with LLM(str(tmp_path), **options) as one, LLM(str(tmp_path), **options) as other:
        one.update_weights(trainer)
        for share in (0.0, 0.01, 0.1, 0.9, 0.03):
            parameters = [p.data for p in trainer.parameters()]
            count = round(share * sum(-(-p.nbytes // pieces) for p in parameters))
            changed = change_pieces(parameters, count, choose, pieces)
            report = one.update_weights(trainer)
            whole = other.update_weights(trainer, delta=False)
            assert report.num_bytes_sent == changed and whole.num_bytes_sent == whole.num_bytes
            assert report.digest == whole.digest
            assert one.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids == (
                other.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids
            )
            assert one.score([[5, 6]], [[7, 8]])[0].tolist() == other.score([[5, 6]], [[7, 8]])[0].tolist()
            assert one.collective_rpc("get_weight_digest") == other.collective_rpc("get_weight_digest")


def test_elements_of_a_strided_tensor_are_found_in_order():
    choose = random.Random(5)
    for shape, view in [((4, 6), lambda t: t[:, :5]), ((3, 4, 8), lambda t: t[:, 1:, :6]), ((6, 4), torch.t)]:
        out = view(torch.zeros(shape))
        values = torch.arange(out.numel()) + 1.0
        for _ in range(40):
            out.zero_()
            start, end = sorted(choose.choices(range(out.numel() + 1), k=2))
            for section, low, high in sync.pieces.sections(out, start, end):
                section.copy_(values[low:high].view(section.shape))
            wanted = torch.zeros(out.numel())
            wanted[start:end] = values[start:end]
            assert torch.equal(out.reshape(-1), wanted)


@pytest.mark.parametrize("pieces_text", ["00", "zz" * 16 * 14, "00" * 16 * 14])
def test_pieces_that_do_not_make_up_the_digest_are_refused(pieces_text):
    spec = sync.manifest.TensorSpec.of_pieces("a", (30, 7), "float32", [b"1" * 16] * 14)
    spec.check()
    broken = sync.manifest.TensorSpec("a", (30, 7), "float32", spec.digest, pieces_text)
    with pytest.raises(sync.errors.ManifestMismatch, match="'a': the digests of its pieces"):
        broken.check()


def test_an_engine_that_was_started_anew_takes_everything_and_then_pieces(make_updater, steps, tmp_path):
    sender, receiver = ends("shm", tmp_path / "meeting")
    source = big(1)
    for version in range(1, 6):
        if version in (1, 4):  # a new process begins with the weights of its checkpoint, at any version
            updater = make_updater(make_live(), [["embed", "head"]])
        source["q"][version, 0] += 1
        report = apply_update(
            updater, sender.offer(source, version, updater.metadata()), receiver, steps, UpdateOptions()
        )
        assert report.num_bytes_sent == (report.num_bytes if version in (1, 4) else 64)
        assert torch.equal(updater.values("q"), source["q"])
    sender.close()


def test_trainers_that_take_turns_send_what_the_weights_of_the_other_lack(make_updater, steps, tmp_path):
    live = make_live()
    updater = make_updater(live, [["embed", "head"]])
    pairs = [ends("shm", tmp_path / str(i)) for i in range(2)]
    sources = [big(1), big(1)]
    for version in range(1, 8):
        who = version % 2
        sources[who]["embed"][3 * version, 0] += 1
        manifest = pairs[who][0].offer(sources[who], version, updater.metadata())
        report = apply_update(updater, manifest, pairs[who][1], steps, UpdateOptions())
        assert version == 1 or 64 <= report.num_bytes_sent < report.num_bytes / 2
        assert all(torch.equal(live[name], sources[who][name]) for name in live if name != "head")
    for sender, _ in pairs:
        sender.close()


def test_an_older_version_brings_its_pieces_back_where_versions_may_go_back(make_updater, steps):
    live, source = make_live(), big(1)
    updater = make_updater(live, [["embed", "head"]])
    sender, receiver = ends("inproc", None)
    apply_update(updater, sender.offer(source, 5, updater.metadata()), receiver, steps, UpdateOptions())
    source["q"][0, 0] += 1
    manifest = sender.offer(source, 3, updater.metadata())
    with pytest.raises(errors.StaleVersionError, match="older than the live version 5"):
        apply_update(updater, manifest, receiver, steps, UpdateOptions())
    report = apply_update(updater, manifest, receiver, steps, UpdateOptions(reset_version=True))
    assert report.num_bytes_sent == 64 and torch.equal(live["q"], source["q"])


def test_a_sender_that_widens_looks_at_what_it_casts_from(tmp_path):
    sender, receiver = ends("shm", tmp_path / "meeting")
    metadata = {"a": ("float32", (100,))}
    source = {"a": torch.randn(100).bfloat16()}
    wide = {"a": torch.zeros(100)}
    for version, dtype in enumerate([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16], 1):
        source["a"] = source["a"].to(dtype)
        source["a"][version] += 1
        manifest = sender.offer(source, version, metadata)
        assert manifest.tensors[0].digest == sync.digests.tensor_digest(source["a"].float())
        receiver.receive_into(wide, manifest)
        assert torch.equal(wide["a"], source["a"].float())
    sender.close()
