"""The text part of composites: loaded, equal to transformers and to the exact trainer, pushed under every naming."""

import asyncio
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from rollout_engine import (
    LLM,
    AsyncLLM,
    ConfigError,
    LoRARequest,
    ManifestMismatchError,
    RequestError,
    RolloutPolicy,
    exact,
)
from rollout_engine import SamplingParams as Params
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.tokenizer import TextCodec
from sync import publish
from tests.integration.composites import COMPOSITES, composite, save, save_as, text_of
from tests.unit.peft_layers import PeftModel

OPTIONS = dict(num_kv_blocks=64, max_model_len=128, dtype="float32", log_stats=False)
PROMPTS = [list(range(5, 45)), list(range(70, 90)), list(range(5, 40))]


def digest(llm):
    [found] = llm.collective_rpc("get_weight_digest")
    return found


def largest_difference(model, batch):
    """Largest difference of the batch's log-probs of sampled tokens from those of a module."""
    found = []
    for ids, real, sampled, logprobs in zip(
        batch["tokens", "full"],
        batch["masks", "all_attention_mask"].bool(),
        batch["masks", "all_assistant_mask"].bool(),
        batch["log_probs", "full"],
        strict=True,
    ):
        logits = model(input_ids=ids[real][None], use_cache=False).logits[0, :-1]
        theirs = logits.log_softmax(-1).gather(1, ids[real][1:, None])[:, 0]
        found.append((theirs - logprobs[real][1:])[sampled[real][1:]].abs().max())
    return float(torch.stack(found).max())


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return save(composite(seed=1), tmp_path_factory.mktemp("old"))


def sampled(policy):
    return policy.rollout(PROMPTS, Params(max_tokens=12, ignore_eos=True), use_tqdm=False)


QUICK = {"gemma3", "qwen2_5_vl"}
REFUSED = {
    "paligemma": "its attention is bidirectional over the whole prompt: .* a second turn changes those of the first",
    "llama4": "chunked_attention",
}
SERVED = [
    pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in COMPOSITES if kind not in REFUSED
]


@pytest.mark.quick(1)
@torch.no_grad()
@pytest.mark.parametrize("kind", SERVED)
def test_text_is_equal_to_the_whole_models_and_to_the_exact_trainers_bits(tmp_path, kind):
    model = composite(kind)
    save(model, tmp_path)
    with RolloutPolicy.from_pretrained(tmp_path, block_size=16, max_num_batched_tokens=33, **OPTIONS) as policy:
        batch = sampled(policy)
        assert largest_difference(model, batch) < 2e-4
        for trainer in (text_of(model), model) if kind == "gemma3" else (model,):
            exact.enable(trainer)
            report = exact.check(batch, exact.token_logprobs(trainer, batch))
            assert report.num_different == 0, report
        policy.update_weights(model)
        assert exact.check(sampled(policy), exact.token_logprobs(model, batch)).num_tokens == report.num_tokens


@pytest.mark.parametrize("kind", REFUSED)
def test_composites_whose_text_cannot_be_served_are_refused_with_the_reason(tmp_path, kind):
    CONFIG_MAPPING[kind](**COMPOSITES[kind]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model_type '{kind}'.* cannot be served exactly: .*{REFUSED[kind]}"):
        LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, **OPTIONS)


def test_every_naming_and_source_updates_with_it(tmp_path, old):
    new = composite(seed=2)
    text = text_of(new)
    save(new, tmp_path / "new"), text.save_pretrained(tmp_path / "text")
    published = load_file(tmp_path / "new" / "model.safetensors")
    assert "language_model.model.norm.weight" in published and "vision_tower.post_layernorm.weight" in published
    publish(tmp_path / "store", new, 9)
    part = {name: tensor for name, tensor in new.state_dict().items() if "layers.1" in name}
    other = {
        name.removeprefix("model.").replace("language_model.", "language_model.model."): tensor
        for name, tensor in part.items()
    }
    with LLM(tmp_path / "text", skip_tokenizer_init=True, **OPTIONS) as llm:
        wanted = digest(llm)
    with LLM(old, **OPTIONS) as llm:
        loaded = digest(llm)
        for source in (
            new,
            text,
            new.model.language_model,
            new.state_dict(),
            published,
            tmp_path / "new",
            tmp_path / "text",
            tmp_path / "store",
        ):
            tied = {"lm_head.weight": new.lm_head.weight} if source is new.model.language_model else {}
            llm.update_weights({**source.state_dict(), **tied} if tied else source)
            assert digest(llm) == wanted
            llm.update_weights(old)
            assert digest(llm) == loaded
            llm.update_weights(old, reset_version=True, version=0)
        halves = []
        for naming in (
            part,
            other,
            {name: text.state_dict()[name] for name in text.state_dict() if "layers.1" in name},
        ):
            llm.update_weights(naming, partial=True)
            halves.append(digest(llm))
            llm.update_weights(old)
        assert len(set(halves)) == 1 and halves[0] not in (loaded, wanted)


def test_tensors_for_images_are_left_out_and_others_refused(old, caplog):
    state = text_of(composite(seed=2)).state_dict()
    with LLM(old, **OPTIONS) as llm:
        with caplog.at_level(logging.INFO, "sync"):
            llm.update_weights(state | {"vision_tower.extra": torch.ones(2)})
        assert "1 tensor is of other parts than the text model" in caplog.text and "vision_tower.extra" in caplog.text
        for name in ("model.language_model.layers.0.scale", "model.ears.weight", "ears.weight"):
            with pytest.raises(ManifestMismatchError, match=rf"not in the model: {name}"):
                llm.update_weights(state | {name: torch.ones(2)})


def test_a_checkpoint_of_a_composite_with_an_unknown_tensor_is_refused(tmp_path, old):
    save(composite(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.ears.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensor not in the model: model\.ears\.weight"):
        LLM(tmp_path, **OPTIONS)


def test_a_head_of_its_own_is_not_tied_though_the_configuration_says_so(tmp_path):
    save(composite("mistral3"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]  # true by default, as in published checkpoints
    path.write_text(json.dumps(config))
    with LLM(tmp_path, **OPTIONS) as llm:
        metadata = llm.get_model_metadata()
        assert llm.llm_engine.collective_rpc("get_tensor_digests")[0].keys() >= {"lm_head.weight", "model.norm.weight"}
        assert metadata.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.slow
def test_experts_may_be_transposed_as_the_hubs_are(tmp_path):
    save(composite("qwen3_vl_moe"), tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        wanted = digest(llm)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if ".mlp.experts." in name else t for name, t in tensors.items()}
    assert sum(turned[name].shape != tensors[name].shape for name in tensors) == 2 * 2
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(tmp_path, **OPTIONS) as llm:
        assert digest(llm) == wanted


def test_a_state_of_a_composite_is_saved_and_loaded(tmp_path, old):
    with LLM(old, **OPTIONS) as llm:
        llm.save_sharded_state(tmp_path / "state")
        saved = digest(llm)
    with LLM(tmp_path / "state", load_format="sharded", **OPTIONS) as llm:
        assert digest(llm) == saved


def matrices(prefix, seed=5):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"lora_A": (2, 48), "lora_B": (96, 2)}
    layers = f"base_model.model.{prefix}layers"
    return {
        f"{layers}.{layer}.self_attn.q_proj.{matrix}.weight": torch.randn(shape, generator=draw)
        for layer in range(2)
        for matrix, shape in shapes.items()
    }


def test_adapters_have_the_names_of_the_composite_or_of_its_text_model(old):
    prefixes = ("model.language_model.", "language_model.model.", "model.")
    eyes = {
        f"base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.{matrix}.weight": torch.ones(shape)
        for matrix, shape in {"lora_A": (2, 32), "lora_B": (32, 2)}.items()
    }
    with LLM(old, max_loras=4, **OPTIONS) as llm:
        for number, prefix in enumerate(prefixes):
            tensors = matrices(prefix) | (eyes if number == 0 else {})
            llm.add_lora(LoRARequest(str(number), tensors=tensors, config={"r": 2, "lora_alpha": 4}))
        params = Params(max_tokens=8, ignore_eos=True, seed=1)
        tokens = [
            llm.generate(PROMPTS, params, lora_request=name, use_tqdm=False)[0].outputs[0].token_ids
            for name in ("0", "1", "2", None)
        ]
        assert tokens[0] == tokens[1] == tokens[2] != tokens[3]
        with pytest.raises(RequestError, match="parts that are not served"):
            llm.add_lora(LoRARequest("eyes", tensors=eyes, config={"r": 2, "lora_alpha": 4}))


def test_an_adapter_of_a_composite_is_sent_alone_and_is_exact(old):
    trainer = exact.enable(PeftModel(composite(seed=1), targets=("q_proj", "down_proj")))
    with RolloutPolicy.from_pretrained(old, max_loras=2, **OPTIONS) as policy:
        report = policy.update_weights(trainer, merge=False)
        assert report.num_tensors == 2 * 2 * 2, "those of the vision tower are left out"
        params = Params(max_tokens=12, ignore_eos=True)
        batch = policy.rollout(PROMPTS, params, lora_request="default", use_tqdm=False)
        with torch.no_grad():
            assert exact.check(batch, exact.token_logprobs(trainer, batch)).is_exact


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "qwen3_vl_moe"])
def test_log_probs_in_bfloat16_are_the_exact_trainers(tmp_path, kind):
    model = save_as(composite(kind).bfloat16(), tmp_path)
    with RolloutPolicy.from_pretrained(tmp_path, **OPTIONS | dict(dtype="bfloat16")) as policy, torch.no_grad():
        batch = sampled(policy)
        assert exact.check(batch, exact.token_logprobs(exact.enable(model), batch)).is_exact


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_core_of_its_own_takes_a_composite_by_every_transport(old, transport):
    async def run():
        with AsyncLLM(old, **OPTIONS) as engine:
            await engine.update_weights(composite(seed=2), transport=transport)
            [found] = await engine.collective_rpc("get_weight_digest")
            return found

    with LLM(old, **OPTIONS) as llm:
        llm.update_weights(composite(seed=2))
        assert asyncio.run(run()) == digest(llm)


@pytest.mark.slow
def test_ranks_load_and_take_a_composite(old):
    with LLM(old, **OPTIONS) as llm, LLM(old, tensor_parallel_size=2, **OPTIONS) as cut:
        for source in (old, composite(seed=2)):
            for engine in (llm, cut):
                engine.update_weights(source)
            params = Params(max_tokens=8, ignore_eos=True, seed=1)
            one, two = (each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, cut))
            assert [each.outputs[0].token_ids for each in one] == [each.outputs[0].token_ids for each in two]


def test_names_of_weights_are_found_under_every_naming(old):
    with LLM(old, **OPTIONS) as llm:
        names = [
            "model.language_model.norm.weight",
            "language_model.model.norm.weight",
            "model.norm.weight",
            "norm.weight",
        ]
        assert (
            llm.llm_engine.frontend.client.call("get_own_names", {"names": names}).result() == ["model.norm.weight"] * 4
        )


def test_inputs_other_than_text_are_refused(old):
    model = exact.enable(composite("gemma4", seed=1))
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(ValueError, match="text alone, and was given pixel_values: Pictures of Gemma4Config cannot be"):
        model(input_ids=ids, pixel_values=torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="was given mm_token_type_ids"):
        model(input_ids=ids, mm_token_type_ids=torch.ones_like(ids))
    model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids), use_cache=False)
    sound = [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "x"}}]}]
    with LLM(old, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="Audio is not served"):
            llm.chat(sound, use_tqdm=False)
        with pytest.raises(RequestError, match="Audio is not served"):
            llm.generate({"prompt": "x", "multi_modal_data": {"audio": None}}, use_tqdm=False)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.json", {"chat_template": "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"}),
        ("processor_config.json", {"chat_template": "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"}),
    ],
)
def test_the_chat_template_of_a_processor_is_used(tmp_path, file, content):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    text = TextCodec.from_pretrained(str(tmp_path)).chat_prompt([{"role": "user", "content": "hello"}])
    assert text == "<hello>"
