"""Prompts with pictures through the engine: transformers' tokens, and the same bits however they are computed."""

import inspect

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from rollout_engine import LLM, LoRARequest, ManifestMismatchError, RequestError, SpeculationConfig
from rollout_engine import SamplingParams as Params
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.model.admission.tower_trial import PictureTrial
from rollout_engine.model.loading import picture_tower
from rollout_engine.testing.tiny_pictures import FAMILIES, random_picture, tiny_vision_checkpoint, tiny_vision_model

OPTIONS = dict(num_kv_blocks=96, block_size=16, max_model_len=512, dtype="float32", log_stats=False)
GREEDY = Params(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
SCORED = Params(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0, prompt_logprobs=0)
QUICK = {"qwen2_5_vl"}
SEEDS = {"kimi_k25": 1}
"""Of weights that sample no placeholder: the embedding of one is another token's in transformers, not here."""
KINDS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
TAKEN = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")


def prompts_of(family):
    """Two pictures between texts; the second of them alone; text."""
    shown = FAMILIES[family].picture
    first, second = random_picture(1, 40, 32), random_picture(2, 24, 36)
    return [
        {"prompt": f"Look: {shown} and {shown} differ", "multi_modal_data": {"image": [first, second]}},
        {"prompt": f"{shown} is what it is", "multi_modal_data": {"image": [second]}},
        {"prompt": "no picture at all, but a text"},
    ]


def facts(output):
    """Every number that a request returns."""
    (sample,) = output.outputs
    assert sample.error is None, sample.error
    scores = sample.logprobs if output.prompt_logprobs is None else [*output.prompt_logprobs[1:], *sample.logprobs]
    return [*sample.token_ids, *np.asarray(scores, np.float32).tolist()]


def generate(llm, prompts, params=SCORED):
    return [facts(output) for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_tokens_are_transformers_own_and_bits_those_of_every_other_order(tmp_path, family):
    seed = SEEDS.get(family, 0)
    directory = tiny_vision_checkpoint(tmp_path, family, seed=seed)
    model, prompts = tiny_vision_model(family, seed=seed), prompts_of(family)
    with LLM(directory, max_num_batched_tokens=512, **OPTIONS) as llm:
        outputs = llm.generate(prompts, SCORED, use_tqdm=False)
        for output in outputs:
            compare_with_transformers(model, output)
        together, sampled = [facts(output) for output in outputs], generate(llm, prompts, GREEDY)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [facts(output) for output in again] == sampled and again[0].num_cached_tokens > 0
    with LLM(directory, max_num_batched_tokens=7, **OPTIONS | dict(num_kv_blocks=12, max_model_len=192)) as llm:
        assert generate(llm, prompts[::-1])[::-1] == together, "in small chunks, with preemption"
    with LLM(directory, max_num_batched_tokens=64, num_threads=2, enable_prefix_caching=False, **OPTIONS) as llm:
        assert [generate(llm, [prompt])[0] for prompt in prompts] == together, "each alone"


def compare_with_transformers(model, output):
    """Compare greedy tokens and their log-probs with those of `generate`."""
    prompt, (sample,) = output.prompt_token_ids, output.outputs
    held = {
        name: [torch.from_numpy(each.picture.arrays[name].copy()) for each in output.pictures]
        for name in (output.pictures[0].picture.arrays if output.pictures else ())
        if name in TAKEN
    }
    axis = 1 if "pixel_attention_mask" in held else 0
    given = {name: torch.cat(arrays if axis else padded(arrays), axis) for name, arrays in held.items()}
    ids = torch.tensor([prompt])
    names, types = inspect.signature(model.forward).parameters, (ids == model.config.image_token_id).int()
    if given:
        given |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=258,
        output_logits=True,
        return_dict_in_generate=True,
        **given,
    )
    assert made.sequences[0, len(prompt) :].tolist() == list(sample.token_ids)
    theirs = torch.stack(made.logits)[:, 0].log_softmax(-1).max(-1).values
    assert (theirs - torch.tensor(sample.logprobs)).abs().max() < 2e-4


def padded(arrays):
    """Pictures in one shape, as transformers takes several; their sizes tell what is padding."""
    if arrays[0].dim() < 4 or len({each.shape[1:] for each in arrays}) == 1:
        return arrays
    most = max(each.shape[1] for each in arrays)
    if arrays[0].dim() == 5:  # of tiles
        return [pad(each, (0, 0, 0, 0, 0, 0, 0, most - each.shape[1])) for each in arrays]
    height, width = (max(each.shape[dim] for each in arrays) for dim in (-2, -1))
    return [pad(each, (0, width - each.shape[-1], 0, height - each.shape[-2])) for each in arrays]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return [tiny_vision_checkpoint(tmp_path_factory.mktemp("seed"), "qwen3_vl", seed=seed) for seed in (0, 1)]


def test_updates_and_sleep_reach_the_tower(checkpoints):
    old, new = checkpoints
    prompts, model = prompts_of("qwen3_vl"), tiny_vision_model("qwen3_vl", seed=1)
    with LLM(new, **OPTIONS) as llm:
        wanted = generate(llm, prompts)
        (digest,) = llm.collective_rpc("get_weight_digest")
    tower = {name: tensor for name, tensor in model.state_dict().items() if ".visual." in name}
    text = {name: tensor for name, tensor in model.state_dict().items() if name not in tower}
    norms = {name: tensor + 1 for name, tensor in tower.items() if name.endswith("merger.norm.weight")}
    with LLM(old, **OPTIONS) as llm:
        before = generate(llm, prompts)
        with pytest.raises(ManifestMismatchError, match=r"missing: pictures\.model\.visual.*partial=True"):
            llm.update_weights(text)
        llm.update_weights(tower, partial=True)
        half = generate(llm, prompts)
        assert half[2] == before[2] and half[0] != before[0] and half[1] != before[1]
        llm.update_weights(text, partial=True)
        assert generate(llm, prompts) == wanted and llm.collective_rpc("get_weight_digest") == [digest]
        llm.update_weights(norms, partial=True)
        assert generate(llm, prompts)[1] != wanted[1], "a plain weight, copied in place, drops features too"
        llm.update_weights(model)
        llm.sleep(level=1)
        llm.wake_up()
        assert generate(llm, prompts) == wanted
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(new)
        llm.reset_encoder_cache()
        assert generate(llm, prompts) == wanted


@pytest.mark.slow
def test_a_sharded_state_and_dummy_weights_have_a_tower(tmp_path, checkpoints):
    prompts = prompts_of("qwen3_vl")
    with LLM(checkpoints[0], **OPTIONS) as llm:
        wanted = generate(llm, prompts[:1])
        llm.save_sharded_state(tmp_path)
    with LLM(tmp_path, load_format="sharded", tokenizer=str(checkpoints[0]), **OPTIONS) as llm:
        assert llm.get_model_metadata().keys() >= {"pictures.model.visual.patch_embed.proj.weight"}
    with LLM(checkpoints[0], load_format="dummy", **OPTIONS) as llm:
        llm.update_weights(checkpoints[0])
        assert generate(llm, prompts[:1]) == wanted


def test_what_is_not_served_is_refused_with_the_reason(tmp_path, checkpoints, monkeypatch):
    prompts = prompts_of("qwen3_vl")
    with LLM(checkpoints[0], max_prompt_pictures=0, **OPTIONS) as llm:
        assert not any(name.startswith("pictures.") for name in llm.get_model_metadata())
        assert len(generate(llm, prompts[2:])) == 1
        with pytest.raises(RequestError, match="max_prompt_pictures=0"):
            generate(llm, prompts)
    with monkeypatch.context() as patches:
        patches.setattr(picture_tower, "try_pictures", lambda config: PictureTrial("Its tower is of another kind."))
        with LLM(tiny_vision_checkpoint(tmp_path, "gemma3"), **OPTIONS) as llm:
            assert len(generate(llm, prompts[2:])) == 1
            with pytest.raises(RequestError, match="Its tower is of another kind"):
                generate(llm, prompts_of("gemma3"))


def test_an_adapter_of_a_part_that_is_not_served_is_refused(checkpoints):
    def eyes(path):
        shapes = {"lora_A": (2, 32), "lora_B": (32, 2)}
        tensors = {f"base_model.model.model.visual.{path}.{name}.weight": torch.ones(shapes[name]) for name in shapes}
        return LoRARequest("eyes", tensors=tensors, config={"r": 2, "lora_alpha": 4})

    with LLM(checkpoints[0], max_loras=1, **OPTIONS) as llm:
        with pytest.raises(RequestError, match=r"visual\.patch_embed\.proj.*a linear layer of"):
            llm.add_lora(eyes("patch_embed.proj"))  # a convolution
        llm.add_lora(eyes("blocks.0.attn.proj"))
    with LLM(checkpoints[0], max_prompt_pictures=0, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="parts that are not served"):
            llm.add_lora(eyes("blocks.0.attn.proj"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral3", "gemma3", "gemma4"])
def test_ranks_compute_the_bits_of_one_process(tmp_path, family):
    old, new = (tiny_vision_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    prompts = prompts_of(family)
    with LLM(new, **OPTIONS) as llm:
        wanted = generate(llm, prompts)
    with LLM(old, tensor_parallel_size=2, **OPTIONS) as llm:
        assert generate(llm, prompts) != wanted
        llm.update_weights(new)
        llm.reset_mm_cache()
        assert generate(llm, prompts) == wanted


def test_a_prompt_that_ends_beside_a_bad_picture_keeps_its_bits(tmp_path):
    """The step fails and is computed again: nothing is drafted behind a prompt whose tokens have no log-probs yet."""
    directory = tiny_vision_checkpoint(tmp_path, "qwen3_5")
    placeholder = tiny_vision_model("qwen3_5").config.image_token_id
    options = OPTIONS | dict(
        max_num_batched_tokens=511, max_model_len=800, speculation=SpeculationConfig(max_draft_tokens=4)
    )
    with LLM(directory, async_scheduling=False, **options) as llm:
        speculator = llm.llm_engine.frontend.client.driver.core._scheduler.speculator
        speculator._costs.of = lambda num_tokens: 1.0  # drafts always pay
        (good,) = llm.generate(
            [{"prompt": FAMILIES["qwen3_5"].picture, "multi_modal_data": {"image": [random_picture(0)]}}],
            GREEDY,
            use_tqdm=False,
        )
        placed = good.pictures[0]
        arrays = dict(placed.picture.arrays, image_grid_thw=placed.picture.arrays["image_grid_thw"] + 2)
        ids = [9, *[placeholder] * (placed.end - placed.start), 9]
        bad = {"prompt_token_ids": ids, "pictures": [PlacedPicture(1, len(ids) - 1, Picture.of(arrays))]}
        params = [
            Params(max_tokens=12, logprobs=0, ignore_eos=True, seed=seed, allowed_token_ids=[5, 6], temperature=0.9)
            for seed in (0, 1)
        ]
        alone, _ = (run_stepwise(llm, [5, 6] * 256, each, []) for each in params)  # later drafts are of the last one
        beside = run_stepwise(llm, [5, 6] * 256, params[0], [bad])
    assert beside == alone


def run_stepwise(llm, token_ids, params, others):
    """The facts of a request, at whose second step `others` are added."""
    engine, found = llm.llm_engine, []
    llm.reset_prefix_cache()
    engine.add_request("asked", {"prompt_token_ids": token_ids}, params)
    engine.step()
    for i, prompt in enumerate(others):
        engine.add_request(f"other {i}", prompt, Params(max_tokens=4))
    while engine.has_unfinished_requests():
        found += [output for output in engine.step() if output.finished]
    assert [output.outputs[0].finish_reason for output in found if output.request_id != "asked"] == ["error"] * len(
        others
    )
    return facts(next(output for output in found if output.request_id == "asked"))
