"""Drafts in files: what one engine has kept another one drafts from, and every other file is refused."""

import numpy as np
import pytest

from rollout_engine import LLM, EngineConfig, LLMEngine, SamplingParams, SpeculationConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.kept_samples import KeptSamples
from rollout_engine.core.draft_index import prompt_key
from rollout_engine.engine.combine import samples as merged
from rollout_engine.testing import tiny_checkpoint
from tests.conformance.clients import CLIENTS

PROMPT = list(range(3, 40))
PARAMS = SamplingParams(n=4, max_tokens=24, seed=1, ignore_eos=True)
ALWAYS = SpeculationConfig(max_draft_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("other"), vocab_size=300)


def make(checkpoint, **options):
    return LLM(checkpoint, **{"speculation": ALWAYS, "log_stats": False, "num_kv_blocks": 64, **options})


@pytest.fixture(scope="module")
def engine(checkpoint):
    with make(checkpoint) as llm:
        yield llm


@pytest.fixture
def saved(engine, tmp_path):
    engine.generate([PROMPT], PARAMS, use_tqdm=False)
    path = tmp_path / "drafts"
    assert engine.save_drafts(path) >= 4
    return path


def drafts_always(llm):
    """Have an engine take any draft that it has, and return what it counts."""
    core = llm.frontend.client.driver.core
    core._scheduler.speculator._costs.of = lambda num_rows: 1.0
    return core.stats.drafts


def test_another_engine_drafts_from_what_one_has_saved_and_says_the_same(checkpoint, engine, saved):
    (expected,) = engine.generate([PROMPT], PARAMS, use_tqdm=False)
    with make(checkpoint, speculation=SpeculationConfig(sources=("rollouts",))) as llm:
        drafts = drafts_always(llm)
        assert llm.load_drafts(saved) == 4
        (found,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
        assert [a.token_ids for a in found.outputs] == [a.token_ids for a in expected.outputs]
        assert sum(drafts.num_accepted) == sum(drafts.num_drafted) > 50


def test_samples_are_kept_once_however_often_they_are_loaded(engine, saved, tmp_path):
    before = engine.save_drafts(tmp_path / "before")
    assert engine.load_drafts(saved) == before
    assert engine.load_drafts(saved) == before
    assert engine.save_drafts(tmp_path / "after") == before


def test_of_more_tokens_than_an_engine_keeps_the_prompts_seen_last_are_taken(checkpoint, engine, tmp_path):
    prompts = [[n] * 5 for n in range(10, 14)]
    for prompt in prompts:
        engine.generate([prompt], SamplingParams(n=2, max_tokens=7, seed=1, ignore_eos=True), use_tqdm=False)
    engine.save_drafts(tmp_path / "all")
    with make(checkpoint, speculation=SpeculationConfig(max_rollout_tokens=45)) as llm:
        assert llm.load_drafts(tmp_path / "all") == 4  # of ten tokens each
        assert [key for key, _ in llm.frontend.client.driver.core.draft_index.list_prompts()] == [
            *map(prompt_key, prompts[2:])
        ]


def test_the_format_is_what_its_module_says(engine, saved):
    magic, header, content = saved.read_bytes().split(b"\n", 2)
    assert magic == b"rollout-engine drafts 1"
    index = engine.frontend.client.driver.core.draft_index.list_prompts()
    token_ids = [token for _, runs in index for run in runs for token in run]
    assert np.frombuffer(content[-4 * len(token_ids) :], "<u4").tolist() == token_ids
    assert content.startswith(b"".join(key for key, _ in index))
    assert b'"vocab_size":259,' in header


def changed(content, place, by=1):
    at = place % len(content)
    return content[:at] + bytes([content[at] ^ by]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: b"PK\3\4" + c, "a file of another kind"),
        (lambda c: b"", "a file of another kind"),
        (lambda c: c.replace(b"drafts 1", b"drafts 2", 1), r"version 2 .*reads up to 1"),
        (lambda c: c[:-1], "1 bytes too short"),
        (lambda c: c + b"12", "2 bytes too long"),
        (lambda c: c[:30], r"Its header was cut or changed \(Input data was truncated\)\. Start without it"),
        (lambda c: changed(c, -1), "Its digest is not"),
        (lambda c: c.replace(b'"num_tokens":', b'"num_tokens":-', 1), "counts must be 0 or more"),
        (lambda c: c.replace(b'"num_tokens"', b'"num_takens"', 1), "num_tokens"),
        (lambda c: c.replace(b'"vocab_size":259', b'"vocab_size":301', 1), "a model with 301 tokens; this one has 259"),
        (lambda c: c.replace(b'"tokenizer":"', b'"tokenizer":"0', 1), "another tokenizer"),
    ],
)
def test_any_other_file_is_refused_and_changes_nothing(engine, saved, tmp_path, change, match):
    before = engine.frontend.client.driver.core.draft_index.list_prompts()
    saved.write_bytes(change(saved.read_bytes()))
    with pytest.raises(
        RequestError, match=rf"load_drafts: path=.*must be a file that save_drafts has written.*{match}"
    ):
        engine.load_drafts(saved)
    assert engine.frontend.client.driver.core.draft_index.list_prompts() == before


def test_every_damaged_byte_is_noticed(engine, saved):
    content = saved.read_bytes()
    start = content.index(b"\n", content.index(b"\n") + 1) + 1
    for place in range(start, len(content), 97):
        saved.write_bytes(changed(content, place, 1 << place % 8))
        with pytest.raises(RequestError, match="load_drafts: path="):
            engine.load_drafts(saved)


def test_the_samples_of_another_model_are_refused(other_checkpoint, saved):
    with make(other_checkpoint) as llm, pytest.raises(RequestError, match="of a model with 259 tokens; this one has"):
        llm.load_drafts(saved)


@pytest.mark.parametrize("path", ["missing/drafts", ".", "nul\0", "x" * 5000])
def test_a_file_that_cannot_be_written_or_read_is_an_error_that_names_it(engine, tmp_path, path):
    for verb in ("save_drafts", "load_drafts"):
        with pytest.raises(RequestError, match=f"{verb}: path=.* is not allowed: must be a file that") as caught:
            getattr(engine, verb)(f"{tmp_path}/{path}")
        assert caught.value.field == "path"
        with pytest.raises(RequestError, match=f"{verb}: path=3 .*must be the path of a file"):
            getattr(engine, verb)(3)
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_what_stood_there(engine, saved, monkeypatch):
    before = saved.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollout_engine.faces.draft_files.os.fsync", fail)
    with pytest.raises(RequestError, match="save_drafts: path=.*No space left"):
        engine.save_drafts(saved)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize(
    ("speculation", "match"),
    [
        ("off", "speculation='off'. Make it with speculation='auto'"),
        (SpeculationConfig(sources=("ngram",)), "need the source 'rollouts'"),
        (SpeculationConfig(max_rollout_tokens=0), "need the source 'rollouts'"),
    ],
)
def test_an_engine_that_keeps_no_samples_says_so(checkpoint, saved, speculation, match):
    with make(checkpoint, speculation=speculation) as llm:
        for call in (llm.save_drafts, llm.load_drafts):
            with pytest.raises(ConfigError, match=f"{call.__name__}: this engine keeps no samples .*{match}"):
                call(saved)


@pytest.mark.slow
def test_engines_in_processes_of_their_own_and_fleets_save_and_load(checkpoint, saved, tmp_path):
    config = EngineConfig(model=checkpoint, speculation=ALWAYS, log_stats=False, num_kv_blocks=64, num_threads=1)
    for kind in ("own process", "fleet of two"):
        with CLIENTS[kind](config) as client:
            engine = LLMEngine.from_client(client)
            count = engine.load_drafts(saved)
            assert engine.save_drafts(tmp_path / kind) == count >= 4
            assert (tmp_path / kind).read_bytes() == saved.read_bytes()


def test_of_a_fleet_each_sample_is_saved_once_and_prompts_seen_last_come_last():
    a, b, c = (bytes([n] * 16) for n in range(3))
    first = KeptSamples.of([(a, [[1], [2]]), (b, [[3]])])
    second = KeptSamples.of([(b, [[3], [4]]), (c, [[5]])])
    found = [(key, [sample.tolist() for sample in samples]) for key, samples in merged([first, second]).prompts()]
    assert sorted(found) == [(a, [[1], [2]]), (b, [[3], [4]]), (c, [[5]])]
    assert found[0][0] == a


def test_kept_samples_whose_columns_do_not_fit_are_refused():
    whole = KeptSamples.of([(bytes(16), [[1, 2], [3]]), (bytes(range(16)), [[4]])])
    assert [[sample.tolist() for sample in samples] for _, samples in whole.prompts()] == [[[1, 2], [3]], [[4]]]
    for name, value in (
        ("prompt_keys", whole.prompt_keys[:1]),
        ("num_samples", np.array([3, 0])),
        ("num_samples", np.array([2**62, 2**62])),
        ("lengths", np.array([1, 1, 1])),
        ("lengths", whole.lengths.astype(np.int32)),
        ("token_ids", whole.token_ids[1:]),
        ("token_ids", whole.token_ids.astype(np.int64)),
    ):
        columns = {each: getattr(whole, each) for each in KeptSamples.__struct_fields__}
        with pytest.raises(ValueError, match="do not fit each other"):
            KeptSamples(**columns | {name: value})
