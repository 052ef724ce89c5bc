"""LoRA adapters on a real tiny model: right, exact, many in one batch, and changed as transactions."""

import asyncio
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rollout_engine import LLM, AsyncLLM, EngineConfig, LLMEngine, LoRARequest, RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import LifecycleError, RequestError, WeightUpdateError
from rollout_engine.testing import merge_adapter, random_adapter, save_adapter, tiny_checkpoint, tiny_model
from tests.unit.peft_layers import PeftModel

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, seed=3)
PROMPT = list(range(3, 45))
SIZES = dict(num_kv_blocks=256, max_model_len=256)


@pytest.fixture(
    scope="module",
    params=[pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["float32", "bfloat16"],
)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, dtype):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=dtype)


@pytest.fixture
def llm(checkpoint, dtype):
    with LLM(checkpoint, dtype=str(dtype).removeprefix("torch."), **SIZES) as llm:
        yield llm
        llm.check_integrity()


def adapter(name="a", **options):
    return random_adapter(tiny_model(), name, **({"seed": ord(name[0])} | options))


def generated(llm, prompts, lora=None, **options):
    return [out.outputs[0] for out in llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=lora, **options)]


def same(one, other):
    return one.token_ids == other.token_ids and np.array_equal(one.logprobs, other.logprobs)


def test_an_adapter_computes_what_merged_weights_do(tmp_path):
    merged = merge_adapter(tiny_model(std=0.1), adapter(std=0.1))
    with LLM(tiny_checkpoint(tmp_path, std=0.1), **SIZES) as llm:
        llm.add_lora(adapter(std=0.1))
        (base,), (got,) = generated(llm, [PROMPT]), generated(llm, [PROMPT], "a")
        ids = torch.tensor([PROMPT + got.token_ids])
        expected = merged(ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])
    assert got.token_ids != base.token_ids
    np.testing.assert_allclose(got.logprobs, expected.detach().flatten(), rtol=1e-3, atol=1e-3)


def test_rows_have_the_same_bits_in_any_company(llm):
    base = generated(llm, [PROMPT, "b", "c"])
    for name in "abc":
        llm.add_lora(adapter(name, rank=4 * (1 + ord(name) % 3)))
    loras = ["a", None, "b", "c", None, "a", "b", "c"]
    prompts = [PROMPT, PROMPT, PROMPT, "b", "b", "c", "c", "c"]
    together = generated(llm, prompts, loras)
    assert same(together[1], base[0]) and same(together[4], base[1])
    for prompt, lora, got in zip(prompts, loras, together, strict=True):
        llm.reset_prefix_cache()
        assert same(got, generated(llm, [prompt], lora)[0])
    assert len({tuple(each.token_ids) for each in together}) == 8


def test_the_layers_may_run_as_modules_or_at_once(llm):
    """A mixed step has the bits of its layers as modules; its base rows have those of a step without adapters."""
    base = generated(llm, [PROMPT])
    llm.add_lora(adapter())
    mixed = generated(llm, [PROMPT, PROMPT], ["a", None])
    seen = []
    worker = llm.frontend.client.driver.executor.worker
    stop = worker.watch_layers(lambda layer, hidden: seen.append(layer))
    llm.reset_prefix_cache()
    watched = generated(llm, [PROMPT, PROMPT], ["a", None])
    stop()
    assert seen and all(same(*pair) for pair in zip(mixed, watched, strict=True))
    assert same(mixed[1], base[0])
    llm.remove_lora("a")
    assert same(generated(llm, [PROMPT])[0], base[0])


def test_scores_under_an_adapter_are_those_of_sampling(llm):
    llm.add_lora(adapter())
    (sampled,) = generated(llm, [PROMPT], "a")
    (base,) = llm.score([PROMPT], [sampled.token_ids])
    (scored,) = llm.score([PROMPT], [sampled.token_ids], lora="a")
    assert np.array_equal(scored, sampled.logprobs)
    assert not np.array_equal(base, scored)
    with pytest.raises(RequestError, match="Unknown adapter 'b'"):
        llm.score([PROMPT], [[5]], lora="b")


def test_a_request_may_bring_its_adapter_along(llm, tmp_path):
    on_disk = save_adapter(tmp_path / "a", adapter())
    (first,) = generated(llm, [PROMPT], on_disk)
    (tmp_path / "a" / "adapter_config.json").unlink()  # it is not read again
    assert same(generated(llm, [PROMPT], on_disk)[0], first)
    assert same(generated(llm, [PROMPT], "a")[0], first)
    [info] = llm.list_loras()
    assert (info.name, info.revision, info.rank, info.is_pinned) == ("a", 0, 8, False)


def test_the_same_values_again_change_nothing(llm, tmp_path):
    info = llm.add_lora(adapter())
    assert llm.add_lora(adapter()) == llm.add_lora(save_adapter(tmp_path, adapter())) == info
    assert llm.add_lora(adapter(revision=5)).revision == 5
    assert llm.policy_version == 0


def test_other_values_need_a_revision_and_are_a_policy_version(llm):
    llm.add_lora(adapter())
    (before,) = generated(llm, [PROMPT], "a")
    with pytest.raises(RequestError, match="revision=0 .* more than 0"):
        llm.add_lora(adapter(seed=7))
    assert same(generated(llm, [PROMPT], "a")[0], before)
    info = llm.add_lora(adapter(seed=7, revision=1))
    assert info.policy_version == llm.policy_version == 1
    out = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request="a")[0]
    assert out.num_cached_tokens == 0 and not same(out.outputs[0], before)
    llm.update_weights(tiny_model(seed=1).state_dict())
    assert llm.policy_version == 2


def test_one_number_says_which_base_and_which_values_sampled_a_token(llm):
    def version(lora=None):
        (sample,) = generated(llm, [PROMPT], lora)
        [span] = sample.version_spans
        return span.policy_version, sample

    assert llm.add_lora(adapter("a")).policy_version == llm.add_lora(adapter("b")).policy_version == 0
    first = version("a")[1]
    assert llm.add_lora(adapter("a", seed=7, revision=1)).policy_version == 1
    assert [version(lora)[0] for lora in ("a", "b", None)] == [1, 1, 1]
    llm.update_weights(tiny_model(seed=1).state_dict())
    assert version("a")[0] == 2 and [info.policy_version for info in llm.list_loras()] == [1, 0]
    llm.update_weights(tiny_model(seed=0).state_dict())
    for seed, expected in ((7, 3), (ord("a"), 4), (ord("a"), 4)):
        llm.remove_lora("a")
        assert llm.add_lora(adapter("a", seed=seed)).policy_version == expected
    number, again = version("a")
    assert number == 4 and same(again, first)


def test_requests_in_flight_go_on_under_the_new_values(checkpoint, dtype):
    config = EngineConfig(model=str(checkpoint), dtype=str(dtype).removeprefix("torch."), **SIZES)
    with LLMEngine.from_config(config) as engine:
        engine.add_lora(adapter())
        engine.add_request("r", PROMPT, PARAMS.clone(max_tokens=10), lora_request="a")
        for _ in range(4):
            engine.step()
        engine.add_lora(adapter(seed=7, revision=1))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        spans = outputs[-1].outputs[0].version_spans
        assert [(s.start, s.end, s.policy_version, s.kv_min_version) for s in spans] == [(0, 4, 0, 0), (4, 10, 1, 0)]
        tokens = outputs[-1].outputs[0].token_ids
        engine.add_request("anew", PROMPT, PARAMS.clone(max_tokens=10), lora_request="a")
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids != tokens


def test_idle_adapters_give_way_and_pinned_ones_do_not(checkpoint):
    with LLM(checkpoint, max_loras=2, **SIZES) as llm:
        llm.add_lora(adapter("a"))
        (first,) = generated(llm, [PROMPT], "a")
        llm.add_lora(adapter("b"))
        llm.pin_lora("b")
        llm.add_lora(adapter("c"))
        assert [info.name for info in llm.list_loras()] == ["b", "c"]
        with pytest.raises(RequestError, match="Unknown adapter 'a'"):
            generated(llm, [PROMPT], "a")
        llm.pin_lora("c")
        with pytest.raises(LifecycleError, match="'b' .pinned., 'c' .pinned."):
            llm.add_lora(adapter("a"))
        assert llm.remove_lora("b") and not llm.remove_lora("b")
        llm.add_lora(adapter("a"))
        assert same(generated(llm, [PROMPT], "a")[0], first)


@contextmanager
def nothing_changes(llm):
    before, (sampled,) = llm.list_loras(), generated(llm, [PROMPT], "a")
    yield
    llm.reset_prefix_cache()
    assert llm.list_loras() == before and same(generated(llm, [PROMPT], "a")[0], sampled)


def _spoilt(**changes):
    made = adapter("b")
    tensors = {changes.get("rename", lambda name: name)(name): each for name, each in made.tensors.items()}
    if "value" in changes:
        next(iter(tensors.values()))[0, 0] = changes["value"]
    return LoRARequest("b", tensors=tensors, config=made.config)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "wrong, match",
    [
        (random_adapter(tiny_model(hidden_size=32, head_dim=8), "b"), "shape of .* of another base model"),
        (random_adapter(tiny_model(), "b", rank=65), r"rank=65 .* at most 64 \(max_lora_rank\)"),
        (_spoilt(rename=lambda name: name.replace("q_proj", "query")), r"target='.*query' .* linear layer of Qwen3"),
        (_spoilt(rename=lambda name: name.replace("model.layers.1.mlp.up_proj", "lm_head")), "other than its head"),
        (_spoilt(value=float("nan")), "NaN"),
        (LoRARequest("b", path="/nowhere"), "adapter_config.json cannot be read"),
        (LoRARequest("b"), "path=None"),
        ("b", "path=None"),
        (3, "lora_request=3"),
    ],
    ids=["base", "rank", "target", "head", "nan", "path", "none", "name", "kind"],
)
def test_adapters_that_cannot_be_served_change_nothing(llm, wrong, match):
    llm.add_lora(adapter())
    with nothing_changes(llm), pytest.raises(RequestError, match=match):
        llm.add_lora(wrong)


def test_requests_of_wrong_adapters_are_refused_before_any_is_queued(llm):
    for lora, match in (("b", "Unknown adapter 'b'"), ([None], "a list of 1"), (3, "lora_request=3")):
        with pytest.raises(RequestError, match=match):
            llm.generate(["a", "b"], PARAMS, use_tqdm=False, lora_request=lora)
    assert llm.get_num_unfinished_requests() == 0
    with pytest.raises(RequestError, match=r"Unknown LoRARequest option 'revison'. Did you mean 'revision'"):
        LoRARequest("a", revison=3)
    with pytest.raises(RequestError, match=r"revision=3 .* must be given with path or tensors"):
        LoRARequest("a", revision=3)
    with pytest.raises(RequestError, match=r"'lora_path' is an option of vLLM's that does not exist here: give path"):
        LoRARequest("a", lora_path="adapters/a")
    with pytest.raises(RequestError, match="give name=..., it has no default"):
        LoRARequest(path="some/where")
    with pytest.raises(RequestError, match=r"path=1 .* names here and no numbers: LoRARequest\(name, path=...\)"):
        LoRARequest("a", 1, "adapters/a")


def test_an_engine_without_exact_products_says_so(checkpoint):
    with LLM(checkpoint, deterministic=False, **SIZES) as llm:
        with pytest.raises(LifecycleError, match="add_lora: this engine computes no adapters"):
            llm.add_lora(adapter())


def test_rollouts_under_two_adapters_and_the_base(checkpoint, dtype):
    name = str(dtype).removeprefix("torch.")
    with RolloutPolicy.from_pretrained(checkpoint, dtype=name, **SIZES) as policy:
        policy.add_lora(adapter("a"))
        options = dict(num_samples=2, seed=1, use_tqdm=False)
        batches = {
            lora: policy.rollout(["x", "y"], PARAMS.clone(seed=None), lora_request=lora, **options)
            for lora in (None, "a", adapter("b"))
            if not isinstance(lora, LoRARequest)
        }
        batches["b"] = policy.rollout(["x", "y"], PARAMS.clone(seed=None), lora_request=adapter("b"), **options)
        for lora, batch in batches.items():
            assert torch.equal(policy.score(batch, lora=lora), batch["log_probs", "full"])
        assert not torch.equal(policy.score(batches["a"]), batches["a"]["log_probs", "full"])
        prompts = [{"prompt": "x", "lora_request": "a"}, {"prompt": "x"}]
        mixed = policy.rollout(prompts, PARAMS.clone(seed=None), **options)
        assert mixed["text", "response"][0] == batches["a"]["text", "response"][0]

        async def groups():
            params = PARAMS.clone(seed=None)
            made = policy.arollout(["x"], params, num_samples=2, seed=1, lora_request=adapter("b"))
            return [group async for group in made]

        (group,) = asyncio.run(groups())
        assert group["text", "response"] == batches["b"]["text", "response"][:2]


@pytest.mark.slow
def test_another_process_computes_the_same(llm, checkpoint, dtype, tmp_path):
    llm.add_lora(adapter())
    (expected,) = generated(llm, [PROMPT], "a")

    async def run():
        async with AsyncLLM(str(checkpoint), dtype=str(dtype).removeprefix("torch."), **SIZES) as engine:
            info = await engine.add_lora(adapter())
            *_, out = [out async for out in engine.generate(PROMPT, PARAMS, lora_request="a")]
            on_disk = save_adapter(tmp_path, adapter("b"))
            *_, other = [out async for out in engine.generate(PROMPT, PARAMS, lora_request=on_disk)]
            with pytest.raises(RequestError, match="Unknown adapter 'c'"):
                await anext(engine.generate(PROMPT, PARAMS, lora_request="c"))
            names = [each.name for each in await engine.list_loras()]
            other_client = engine.frontend.client.connect(engine.frontend.client.address)
            assert (await engine.add_lora(adapter(seed=7, revision=1))).policy_version == engine.policy_version == 1
            assert other_client.call("list_loras", {"timeout": None}).result(60) == await engine.list_loras()
            assert other_client.policy_version == 1
            other_client.shutdown()
            return info, out.outputs[0], other.outputs[0], names, await engine.remove_lora("b")

    info, got, other, names, removed = asyncio.run(run())
    assert info == llm.list_loras()[0] and same(got, expected) and not same(other, expected)
    assert names == ["a", "b"] and removed


def test_a_peft_model_may_send_its_adapter_alone(checkpoint, dtype):
    trainer = PeftModel(tiny_model(dtype=dtype))
    exact.enable(trainer)
    name = str(dtype).removeprefix("torch.")
    with RolloutPolicy.from_pretrained(checkpoint, dtype=name, **SIZES) as policy:
        for version in (1, 2):
            report = policy.update_weights(trainer, merge=False)
            assert (report.version, report.num_tensors) == (version, 2 * len(trainer.adapters()))
            assert report.num_bytes_sent == report.num_bytes > 0 and report.adapter == "alone"
            assert policy.update_weights(trainer, merge=False, version=version).num_bytes_sent == 0
            options = dict(num_samples=2, lora_request="default", use_tqdm=False)
            batch = policy.rollout(["x", "y"], PARAMS.clone(seed=None), **options)
            mask = batch["masks", "all_assistant_mask"][:, 1:]
            assert set(batch["policy_version"][:, 1:][mask].tolist()) == {version}
            ids = batch["tokens", "full"], batch["masks", "all_attention_mask"]
            assert torch.equal(exact.token_logprobs(trainer, *ids)[mask], batch["log_probs", "full"][:, 1:][mask])
            with torch.no_grad():
                trainer.adapters()[0].lora_B["default"].weight.mul_(-1)
        whole = policy.update_weights(tiny_model(seed=1, dtype=dtype))
        assert whole.version == 3 and whole.num_tensors > report.num_tensors and whole.adapter is None


def test_two_policies_on_one_base_train_against_each_others_frozen_copy(checkpoint, dtype):
    """Training as in the example: four adapters, and log-probs under three policies, with the trainers' bits."""
    base = exact.enable(tiny_model(dtype=dtype))
    trainers = {name: exact.enable(PeftModel(tiny_model(dtype=dtype), name=name)) for name in ("red", "blue")}
    name = str(dtype).removeprefix("torch.")
    with RolloutPolicy.from_pretrained(checkpoint, dtype=name, max_loras=4, **SIZES) as policy:
        for each, trainer in trainers.items():
            policy.update_weights(trainer, merge=False)
            policy.add_lora(trainer.request(f"{each} frozen"))
        frozen = {}
        for step in range(2):
            for each, rival in (("red", "blue"), ("blue", "red")):
                trainer = trainers[each]
                batch = policy.rollout(["x", "y"], num_samples=2, lora_request=each, seed=1, use_tqdm=False)
                ids, mask = (batch["tokens", "full"], batch["masks", "all_attention_mask"]), slice(1, None)
                sampled = batch["masks", "all_assistant_mask"][:, mask]
                own = exact.token_logprobs(trainer, *ids)
                reference = policy.score(batch)
                theirs = policy.score(batch, lora=f"{rival} frozen")
                assert torch.equal(own[sampled], batch["log_probs", "full"][:, mask][sampled])
                assert torch.equal(exact.token_logprobs(base, *ids)[sampled], reference[:, mask][sampled])
                if each == "red" and not step:  # the rival is still what its frozen copy is
                    found = exact.token_logprobs(trainers[rival], *ids)
                    assert torch.equal(found[sampled], theirs[:, mask][sampled])
                    frozen = {"batch": batch, "scores": theirs}
                (own[sampled] - theirs[:, mask][sampled]).mean().backward()
                with torch.no_grad():
                    for parameter in trainer.parameters():
                        if parameter.requires_grad:
                            parameter -= 0.5 * parameter.grad.sign() * parameter.abs().mean()
                trainer.zero_grad()
                policy.update_weights(trainer, merge=False)
        assert policy.policy_version == 6
        assert torch.equal(policy.score(frozen["batch"], lora="blue frozen"), frozen["scores"])
        assert not torch.equal(policy.score(frozen["batch"], lora="blue"), frozen["scores"])


def test_what_does_not_go_with_an_adapter_alone_is_refused(llm):
    trainer = PeftModel(tiny_model())
    for wrong, options, match in (
        (tiny_model(), {}, "merge=False sends the adapter of a PeftModel"),
        (trainer, dict(mode="abort"), "mode='abort' does not go with merge=False"),
        (trainer, dict(version=0), "version=0 .* more than 0"),
        (PeftModel(tiny_model(), rank=65), {}, "rank=65"),
    ):
        with pytest.raises(WeightUpdateError, match=match):
            llm.update_weights(wrong, merge=False, **options)
    with pytest.raises(WeightUpdateError, match="merge='no' is not allowed: must be True, or False for a LoRA"):
        llm.update_weights(trainer, merge="no")
    assert llm.policy_version == 0 and not llm.list_loras()


def test_a_push_to_a_sleeping_engine_is_refused_under_the_name_that_the_user_called(checkpoint, dtype):
    trainer = PeftModel(tiny_model())
    with RolloutPolicy.from_pretrained(checkpoint, dtype=str(dtype).removeprefix("torch."), **SIZES) as policy:
        policy.sleep(level=2)
        with pytest.raises(LifecycleError, match=r"^update_weights: not possible while the engine is ASLEEP"):
            policy.update_weights(trainer, merge=False)
        assert policy.list_loras() == [] and policy.policy_version == 0
