"""A draft model of an engine: what is refused, its weights and their updates, sleep, memory."""

import asyncio
import itertools

import pytest
import torch

from rollout_engine import LLM, AsyncLLM, SamplingParams
from rollout_engine.base.errors import ConfigError, LifecycleError, ManifestMismatchError, WeightUpdateError
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.testing import tiny_checkpoint, tiny_model

NUM_LAYERS = 12
LONG = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)


def target_model():
    """A model of which all layers but the first add nothing: its first layer alone computes the same."""
    model = tiny_model("qwen3", num_hidden_layers=NUM_LAYERS)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def good_draft():
    """The first layer of the target."""
    model, target = tiny_model("qwen3", num_hidden_layers=1), target_model()
    model.load_state_dict({name: value for name, value in target.state_dict().items() if name in model.state_dict()})
    return model


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Name -> directory of a checkpoint: "target", "good" and "bad" drafts."""
    root = tmp_path_factory.mktemp("drafts")
    found = {name: tiny_checkpoint(root / name, num_hidden_layers=1, seed=9) for name in ("good", "bad")}
    found["target"] = tiny_checkpoint(root / "target", num_hidden_layers=NUM_LAYERS)
    target_model().save_pretrained(found["target"])
    good_draft().save_pretrained(found["good"])
    return found


@pytest.fixture
def make_llm(directories):
    """make_llm(draft="good", **SpeculationConfig) -> LLM over the target whose draft model always seems to pay."""
    made = []

    def make(draft="good", **speculation):
        config = SpeculationConfig(sources=(), draft_model=str(directories[draft]), **speculation)
        llm = LLM(str(directories["target"]), speculation=config, num_kv_blocks=64, log_stats=False)
        made.append(llm)
        model = drafting(llm)
        for costs, seconds in (model._costs, 1.0), (model._draft_costs, 1e-6):
            costs.of = lambda num_rows, seconds=seconds: seconds
        core_of(llm)._scheduler.speculator._costs.of = lambda num_rows: 1.0
        return llm

    yield make
    for llm in made:
        llm.shutdown()


def core_of(llm):
    return llm.frontend.client.driver.core


def drafting(llm):
    return core_of(llm).draft_model


def accepted(llm):
    """Generate, and return (tokens, share of drafted tokens that were right)."""
    drafts = core_of(llm).stats.drafts
    before = sum(drafts.num_drafted), sum(drafts.num_accepted)
    (output,) = llm.generate(["Once upon"], LONG, use_tqdm=False)
    num_drafted, num_accepted = sum(drafts.num_drafted) - before[0], sum(drafts.num_accepted) - before[1]
    return output.outputs[0].token_ids, num_accepted / max(num_drafted, 1)


def start(directories, **speculation):
    config = SpeculationConfig(**speculation)
    LLM(str(directories["target"]), speculation=config, num_kv_blocks=64, log_stats=False).shutdown()


def test_a_model_of_another_vocabulary_is_refused(directories, tmp_path):
    other = tiny_checkpoint(tmp_path, num_hidden_layers=1, vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocabulary has 300 tokens, the model's 259.*same tokenizer"):
        start(directories, draft_model=str(other))


def test_a_model_of_another_tokenizer_is_refused(directories, tmp_path):
    other = tiny_checkpoint(tmp_path, num_hidden_layers=1)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"!": 3', '"!": 4').replace('"\\"": 4', '"\\"": 3'))
    with pytest.raises(ConfigError, match=r"its token 3 is '\"', the model's '!'.*same tokenizer"):
        start(directories, draft_model=str(other))


def test_a_model_that_classifies_is_refused(directories, tmp_path):
    other = tiny_checkpoint(tmp_path, num_hidden_layers=1, head="sequence", num_labels=1)
    with pytest.raises(ConfigError, match="has no output head"):
        start(directories, draft_model=str(other))


def test_a_model_that_cannot_be_loaded_is_refused_by_name(directories, tmp_path):
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: .*does not exist"):
        start(directories, draft_model=str(tmp_path / "nothing here"))
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: .*no config\.json"):
        start(directories, draft_model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: "):
        start(directories, draft_model=str(tmp_path))


def test_a_module_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"draft_model=Qwen3.*save_pretrained.*update_weights\(model, draft=True\)"):
        SpeculationConfig(draft_model=tiny_model())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(sources=()), "nothing to draft from"),
        (dict(draft_model=""), "draft_model=''"),
        (dict(draft_kv_cache_bytes=1 << 20), "without a draft_model"),
        (dict(draft_model=3), "draft_model=3"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, what):
    with pytest.raises(ConfigError, match=what):
        SpeculationConfig(**options)


def test_a_pool_that_holds_nothing_is_refused(directories):
    with pytest.raises(ConfigError, match=r"draft_kv_cache_bytes=5 .*two KV blocks"):
        start(directories, draft_model=str(directories["good"]), draft_kv_cache_bytes=5)


@pytest.mark.slow
def test_the_draft_models_pool_is_bounded(make_llm):
    assert make_llm().frontend.client.info.draft.num_blocks == 64  # an eighth of twelve layers' bytes holds more
    bytes_per_block = 16 * 2 * (16 + 16) * 4
    llm = make_llm(draft_kv_cache_bytes=5 * bytes_per_block + 1)
    assert llm.frontend.client.info.draft.num_blocks == 5
    accepted(llm)


SOURCES = {
    "module": lambda directories: good_draft(),
    "state dict": lambda directories: good_draft().state_dict(),
    "iterator": lambda directories: iter(good_draft().state_dict().items()),
    "directory": lambda directories: str(directories["good"]),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.slow
def test_new_weights_of_the_draft_model_make_its_drafts_right(make_llm, directories, source):
    llm = make_llm("bad")
    tokens, share = accepted(llm)
    assert share < 0.3
    report = llm.update_weights(SOURCES[source](directories), draft=True)
    assert report.version == 1 and llm.frontend.client.policy_version == 0
    again, share = accepted(llm)
    assert again == tokens and share > 0.95


def broken(error):
    items = good_draft().state_dict().items()
    yield from itertools.islice(items, 3)
    raise error


def not_a_number():
    state = good_draft().state_dict()
    state["model.norm.weight"] = state["model.norm.weight"] * torch.nan
    return state


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: broken(RuntimeError("the trainer died")), id="torn", marks=pytest.mark.slow),
        pytest.param(not_a_number, id="NaN", marks=pytest.mark.slow),
        pytest.param(target_model, id="another model's"),
        pytest.param(lambda: dict(itertools.islice(good_draft().state_dict().items(), 3)), id="incomplete"),
    ],
)
def test_a_push_that_fails_leaves_the_old_draft_model(make_llm, source):
    llm = make_llm("good")
    tokens, share = accepted(llm)
    assert share > 0.95
    with pytest.raises((WeightUpdateError, RuntimeError)):
        llm.update_weights(source(), draft=True)
    again, share = accepted(llm)
    assert again == tokens and share > 0.95
    assert llm.update_weights(target_model()).version == 1, "the policy's weights are as they were"


def test_weights_of_the_policy_are_not_taken_for_the_draft_models(make_llm, directories):
    match = (
        r"not in the model: .* draft=True sends them to the draft model '.+'; leave it out for the policy's weights\.$"
    )
    with pytest.raises(ManifestMismatchError, match=match):
        make_llm().update_weights(target_model(), draft=True)


def test_updates_of_both_models_go_on_beside_each_other(make_llm):
    llm = make_llm("bad")
    assert llm.update_weights(target_model()).version == 1
    assert llm.update_weights(good_draft(), draft=True).version == 1
    assert llm.update_weights(target_model()).version == 2
    assert llm.update_weights(good_draft(), draft=True, version=7).version == 7
    with pytest.raises(WeightUpdateError, match="older than the live version 7"):
        llm.update_weights(good_draft(), draft=True, version=3)
    assert accepted(llm)[1] > 0.95


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [dict(mode="wait"), dict(kv="recompute"), dict(merge=False)])
def test_options_that_a_draft_model_has_no_use_for_are_refused(make_llm, options):
    with pytest.raises(WeightUpdateError, match=r"draft=True.*does not go|does not go with draft=True"):
        make_llm().update_weights(good_draft(), draft=True, **options)


def test_an_engine_without_a_draft_model_refuses_its_weights(directories):
    llm = LLM(str(directories["target"]), speculation="auto", num_kv_blocks=64, log_stats=False)
    with pytest.raises(LifecycleError, match=r"has no draft model.*SpeculationConfig\(draft_model="):
        llm.update_weights(good_draft(), draft=True)
    llm.shutdown()


@pytest.mark.slow
def test_a_sleeping_engine_frees_the_draft_model_and_restores_it(make_llm):
    llm = make_llm()
    usage = lambda: llm.collective_rpc("get_memory_usage")[0]["draft_model"]  # noqa: E731
    tokens, _ = accepted(llm)
    awake = usage()
    llm.sleep(level=1)
    assert usage() < awake
    llm.wake_up()
    again, share = accepted(llm)
    assert again == tokens and share > 0.95
    llm.sleep(level=2)
    assert usage() < awake / 4
    llm.wake_up()
    llm.update_weights(target_model())
    again, _ = accepted(llm)
    assert again == tokens and drafting(llm).is_off, "its weights are gone, and nothing is drafted"
    llm.update_weights(good_draft(), draft=True)
    again, share = accepted(llm)
    assert again == tokens and share > 0.95


@pytest.mark.slow
def test_an_engine_in_its_own_process_takes_a_draft_models_weights(directories):
    async def play():
        config = SpeculationConfig(sources=(), draft_model=str(directories["bad"]))
        llm = AsyncLLM(str(directories["target"]), speculation=config, num_kv_blocks=64, log_stats=False)
        try:
            reports = [
                await llm.update_weights(target_model()),
                await llm.update_weights(good_draft(), draft=True),
                await llm.update_weights(target_model()),
                await llm.update_weights(str(directories["good"]), draft=True),
            ]
            with pytest.raises(WeightUpdateError):
                await llm.update_weights(not_a_number(), draft=True)
            async for _ in llm.generate("Once upon", LONG, "a"):
                pass
            drafts = (await llm.get_metrics()).core.counters.drafts
        finally:
            llm.shutdown()
        assert [report.version for report in reports] == [1, 1, 2, 2]
        assert reports[1].num_tensors < reports[0].num_tensors
        assert sum(drafts.num_accepted) > 10

    asyncio.run(play())
