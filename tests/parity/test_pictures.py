"""Prompts with pictures: tokens of transformers, and the trainer's bits through whatever the engine did.

    PICTURE_FUZZ_TOKENS=5000 python -m pytest tests/parity/test_pictures.py -m slow -s

Each round draws an engine (chunks that end inside pictures, blocks, pools so small that requests are preempted, prefix
caching, drafts, a cache of features that holds one picture or all), prompts with 1 to 4 pictures of random sizes in
random places and 8 samples, among them equal ids with other pictures, and updates of all weights while requests are in
flight. No tolerance.
"""

import os
import random
from collections import Counter

import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams, SpeculationConfig, exact
from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.model.admission import tower_trial
from rollout_engine.testing import assert_clean
from rollout_engine.testing.tiny_pictures import FAMILIES, tiny_vision_checkpoint, tiny_vision_model
from tests.drawn_pictures import Drawn, PictureSource, batch_of, draw_text, plain_logits
from tests.integration.composites import composite, save
from tests.parity.test_bits import DTYPES, draw_engine
from tests.parity.versions import compare
from tests.unit.peft_layers import LoraLinear, PeftModel, tower_linears

NUM_TOKENS = int(os.environ.get("PICTURE_FUZZ_TOKENS", "1000"))
"""Log-probs that the slow tests compare for each model and dtype."""
NUM_VERSIONS = 3
"""Different weights that updates bring, in turn; the last differs from the first in its tower alone."""
QUICK = [("qwen3_vl", torch.float32), ("gemma3", torch.bfloat16)]
HYBRIDS = {"qwen3_5"}
TIE = 1e-4
"""Logits of float32 that are closer than this may be ordered either way."""
TEXT_IDS = list(range(3, 259))

pytestmark = pytest.mark.usefixtures("own_products")


class Weights:
    """A checkpoint, and trainers with different weights of its model, in the order of the versions."""

    def __init__(self, directory, family, dtype):
        self.directory = tiny_vision_checkpoint(directory, family, dtype=dtype)
        self.source = PictureSource(self.directory, tiny_vision_model(family))
        models = [tiny_vision_model(family, dtype=dtype, seed=seed) for seed in (0, 1, 0)]
        with torch.no_grad():
            for name, parameter in models[2].named_parameters():
                if not name.startswith(("model.language_model.", "model.text_model.", "lm_head.")):
                    parameter.mul_(1.25)
        self._trainers = [exact.enable(model) for model in models]

    def of(self, version):
        return self._trainers[version % NUM_VERSIONS]


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory):
    """weights_of(family, dtype) -> its `Weights`, made once."""
    made = {}

    def make(family, dtype):
        if (family, dtype) not in made:
            made[family, dtype] = Weights(tmp_path_factory.mktemp(family), family, dtype)
        return made[family, dtype]

    return make


def draw_prompts(source, rng):
    """Prompts with pictures, without, with equal beginnings, and with equal ids and another picture."""
    pool = [source.draw_picture(rng) for _ in range(4)]
    prompts = [source.prompt(rng, rng.choices(pool, k=num)) for num in (1, 2, rng.choice([3, 4]))]
    ids, placed = prompts[1]
    prompts.append(Drawn(ids + draw_text(rng, 20), placed))
    first = PlacedPicture(placed[0].start, placed[0].end, source.other(placed[0].picture, rng))
    prompts.append(Drawn(ids, (first, *placed[1:])))
    prompts.append(Drawn(draw_text(rng, 60), ()))
    rng.shuffle(prompts)
    return prompts


def as_prompt(drawn):
    return {"prompt_token_ids": drawn.ids, "pictures": list(drawn.placed)} if drawn.placed else drawn.ids


def draw_options(rng, family, dtype):
    options = draw_engine(rng) | dict(
        dtype=str(dtype)[6:], max_num_batched_tokens=rng.choice([1, 7, 7, 33, 33, 64, 512])
    )
    options |= dict(encoder_cache_bytes=rng.choice([0, 1 << 13, 1 << 20]), max_model_len=380)
    if rng.random() < 0.5:  # requests are preempted
        options |= dict(num_kv_blocks=-(-400 // options["block_size"]), max_num_seqs=20)
    else:
        options["num_kv_blocks"] = -(-2000 // options["block_size"])
    options["max_num_seqs"] = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    if family in HYBRIDS:
        options["state_cache_bytes"] = rng.choice([None, 0, 1 << 18]) if options["enable_prefix_caching"] else None
    if rng.random() < 0.4 and options["max_num_batched_tokens"] > 1:
        speculation = SpeculationConfig(max_draft_tokens=rng.choice([1, 3, 8]))
        options |= dict(speculation=speculation, async_scheduling=False)
    return options


def run_round(weights, family, rng, dtype, *, most=40, num_samples=8, num_updates=None, **options):
    """Counts of what happened in one engine, and of log-probs compared and wrong."""
    options = draw_options(rng, family, dtype) | options
    temperature, counts = rng.choice([1.0, 0.7, 0.3]), Counter()
    prompts = draw_prompts(weights.source, rng)
    bias = rng.choice([None, {weights.source.token: 4.0}])  # placeholders are sampled, and are ordinary tokens
    params = SamplingParams(temperature=temperature, logprobs=0, ignore_eos=True, n=num_samples, logit_bias=bias)
    requests = [(each, params.clone(max_tokens=rng.choice([5, most]), seed=rng.randrange(1000))) for each in prompts]
    with LLM(str(weights.directory), deterministic=True, log_stats=False, **options) as llm:
        core, outputs = llm.frontend.client.driver.core, []
        if "speculation" in options:
            core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        for part in range(2):  # the second finds prefixes of the first, if no update is between
            outputs += generate(llm.llm_engine, weights, rng, f"{part}", requests, counts, num_updates)
        counts.update(
            preempted=core.stats.num_preemptions,
            cached=core.stats.num_cached_tokens,
            drafted=sum(core.stats.drafts.num_drafted),
            drafted_right=sum(core.stats.drafts.num_accepted),
        )
        assert_clean(llm.llm_engine)
    sampled = [token for output in outputs for sample in output.outputs for token in sample.token_ids]
    counts["placeholders"] += sampled.count(weights.source.token)
    torch.set_num_threads(rng.choice([1, 2]))
    compare(outputs, weights.of, temperature, counts)
    return counts


def generate(engine, weights, rng, prefix, requests, counts, num_updates):
    """Outputs of requests, between whose steps the weights may change."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"{prefix}-{index}", as_prompt(prompt), params)
    num_updates = rng.choice([0, 1, 2]) if num_updates is None else num_updates
    updates, outputs, step = {rng.randrange(2, 30) for _ in range(num_updates)}, [], 0
    while engine.has_unfinished_requests():
        if step in updates:
            engine.update_weights(weights.of(engine.policy_version + 1), kv="recompute")
            counts["updates"] += 1
        outputs += [output for output in engine.step() if output.finished]
        step += 1
    return outputs


@pytest.mark.quick(1)
@pytest.mark.parametrize(("family", "dtype"), QUICK, ids=str)
def test_no_bit_differs_from_the_trainer(weights_of, family, dtype):
    counts, rng = Counter(), random.Random(f"{family} {dtype}")
    small = dict(
        max_num_batched_tokens=33, max_num_seqs=20, block_size=4, num_kv_blocks=60, encoder_cache_bytes=1 << 14
    )
    round_of = dict(
        most=26, num_samples=4, num_updates=1, enable_prefix_caching=True, max_model_len=240, num_threads=1, **small
    )
    counts.update(run_round(weights_of(family, dtype), family, rng, dtype, **round_of))
    assert counts["compared"] > 200
    assert counts["updates"] and counts["preempted"] and counts["cached"], counts
    assert counts["wrong"] == 0, f"{counts['wrong']} of {counts['compared']} log-probs differ"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_differs_over_many_tokens(weights_of, family, dtype):
    weights, counts, rng = weights_of(family, dtype), Counter(), random.Random(f"many {family} {dtype}")
    while counts["compared"] < NUM_TOKENS:
        counts.update(run_round(weights, family, rng, dtype))
        print(f"{family} {dtype}: {dict(counts)}", flush=True)
        assert counts["wrong"] == 0, f"{counts['wrong']} of {counts['compared']} log-probs differ"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "family",
    [name if name in ("qwen3_vl", "idefics3") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_greedy_tokens_and_log_probs_are_those_of_transformers(weights_of, family):
    weights, rng = weights_of(family, torch.float32), random.Random(family)
    prompts = draw_prompts(weights.source, rng)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, allowed_token_ids=TEXT_IDS)
    small = dict(max_num_batched_tokens=33, block_size=16, num_kv_blocks=64, max_model_len=380)
    with LLM(str(weights.directory), log_stats=False, **small) as llm:
        outputs = llm.generate([as_prompt(each) for each in prompts], params, use_tqdm=False)
    plain = tiny_vision_model(family)
    for drawn, output in zip(prompts, outputs, strict=True):
        sample = output.outputs[0]
        with torch.no_grad():
            logits = plain_logits(plain, batch_of([Drawn(drawn.ids + sample.token_ids, drawn.placed)]))
        logits = logits[0, len(drawn.ids) - 1 : -1]
        chosen = torch.tensor(sample.token_ids)[:, None]
        assert (logits[:, TEXT_IDS].amax(-1) - logits.gather(1, chosen)[:, 0]).max() < TIE
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=1e-4, rtol=0)


def test_equal_ids_with_another_picture_share_no_prefix(weights_of):
    """The negative control: were pictures not part of what prefixes are found by, these log-probs would differ."""
    weights, rng = weights_of("qwen3_vl", torch.float32), random.Random(5)
    source = weights.source
    first, second = (source.picture(seed, 40, 32) for seed in (1, 2))
    ids, placed = source.prompt(rng, [first], most=20)
    other = (PlacedPicture(placed[0].start, placed[0].end, second),)
    params, counts = SamplingParams(max_tokens=8, n=4, logprobs=0, ignore_eos=True, seed=3), Counter()
    with LLM(str(weights.directory), log_stats=False, block_size=4) as llm:
        outputs = [
            llm.generate([as_prompt(Drawn(ids, each))], params, use_tqdm=False)[0] for each in (placed, other, placed)
        ]
    assert outputs[1].num_cached_tokens <= placed[0].start < outputs[2].num_cached_tokens
    assert [sample.token_ids for sample in outputs[0].outputs] == [sample.token_ids for sample in outputs[2].outputs]
    compare(outputs, weights.of, 1.0, counts)
    assert (counts["compared"], counts["wrong"]) == (3 * 4 * 8, 0)


def test_spans_of_one_picture_that_end_elsewhere_share_no_prefix(weights_of):
    """Where tokens see a picture to its end, KV of its first ones depends on the tokens of the whole span."""
    weights = weights_of("gemma3", torch.bfloat16)
    picture, token = weights.source.picture(1, 40, 32), weights.source.token
    size = weights.source.num_features(picture)
    params, counts = SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True, seed=3), Counter()
    with LLM(str(weights.directory), log_stats=False, block_size=4, dtype="bfloat16") as llm:
        outputs = []
        for between in ([], [33] * 4, [33] * 4):
            ids = [5, 6, 7, 8, *[token] * 8, *between, *[token] * (size - 8), 9, 10, 11, 12]
            placed = (PlacedPicture(4, len(ids) - 4, picture),)
            outputs += llm.generate([as_prompt(Drawn(ids, placed))], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 4, 24]
    compare(outputs, weights.of, 1.0, counts)
    assert (counts["compared"], counts["wrong"]) == (12, 0)


def test_score_and_a_loaded_trainer_have_the_sampled_bits(weights_of):
    weights, rng = weights_of("qwen3_vl", torch.float32), random.Random(6)
    prompts, counts = draw_prompts(weights.source, rng), Counter()
    params = SamplingParams(max_tokens=9, n=3, logprobs=0, ignore_eos=True, seed=3, temperature=0.8)
    with LLM(str(weights.directory), log_stats=False) as llm:
        outputs = llm.generate([as_prompt(each) for each in prompts], params, use_tqdm=False)
        samples = [(output, sample) for output in outputs for sample in output.outputs]
        given = [output.prompt_token_ids for output, _ in samples], [sample.token_ids for _, sample in samples]
        pictures = [output.pictures for output, _ in samples]
        scored = llm.score(*given, temperature=0.8, pictures=pictures)
        without = llm.score(*given, temperature=0.8)
        beyond = [PlacedPicture(1, 9, weights.source.picture(1, 40, 32))]
        with pytest.raises(RequestError, match="in order, apart, and inside its pair"):
            llm.score([[5, 6]], [[7]], pictures=[beyond])
    for (output, sample), values, blind in zip(samples, scored, without, strict=True):
        np.testing.assert_array_equal(sample.logprobs, values)
        assert bool(output.pictures) == (not np.array_equal(values, blind))
    trainer = exact.load(weights.directory)
    assert type(trainer) is type(weights.source.composite)
    compare(outputs, lambda version: trainer, 0.8, counts)
    assert (counts["compared"], counts["wrong"]) == (len(prompts) * 3 * 9, 0)


def test_an_adapter_of_the_text_is_exact_beside_pictures(weights_of):
    weights, rng, counts = weights_of("qwen3_vl", torch.float32), random.Random(7), Counter()
    trainer = exact.enable(PeftModel(tiny_vision_model("qwen3_vl"), targets=("q_proj", "down_proj")))
    params = SamplingParams(max_tokens=9, n=2, logprobs=0, ignore_eos=True, seed=3)
    with LLM(str(weights.directory), log_stats=False, max_num_batched_tokens=33) as llm:
        llm.add_lora(trainer.request())
        prompts = [as_prompt(each) for each in draw_prompts(weights.source, rng)]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request="x")
    compare(outputs, lambda version: trainer, 1.0, counts)
    assert (counts["compared"], counts["wrong"]) == (len(prompts) * 2 * 9, 0)


def adapted_trainer(family, dtype, name, seed):
    """A trainer with an adapter of all linears of tower and projector, and of those of the text with their names."""
    model = tiny_vision_model(family, dtype=dtype)
    torch.manual_seed(seed)
    return exact.enable(PeftModel(model, tower_linears(model) | {"v_proj"}, rank=4, name=name))


@pytest.mark.parametrize(
    ("family", "dtype", "num_ranks"),
    [
        *(
            pytest.param(family, dtype, 1, marks=[] if (family, dtype) == QUICK[0] else pytest.mark.slow)
            for family in FAMILIES
            for dtype in DTYPES
        ),
        pytest.param("qwen2_5_vl", torch.float32, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_of_the_tower_are_exact_each_with_features_of_its_own(weights_of, family, dtype, num_ranks):
    weights, rng, counts = weights_of(family, dtype), random.Random(f"tower {family}"), Counter()
    old, new, other = (adapted_trainer(family, dtype, name, seed) for name, seed in (("x", 1), ("x", 2), ("y", 3)))
    params = SamplingParams(max_tokens=7, n=2, logprobs=0, ignore_eos=True, seed=3)
    picture = weights.source.draw_picture(rng)
    prompts = [as_prompt(weights.source.prompt(rng, [picture])) for _ in range(2)]
    small = dict(max_num_batched_tokens=33, max_num_seqs=12, max_loras=2, dtype=str(dtype)[6:])
    small |= dict(tensor_parallel_size=num_ranks)
    with LLM(str(weights.directory), log_stats=False, **small) as llm:
        llm.add_lora(old.request("x"))
        llm.add_lora(other.request("y"))

        def run(of_names):
            """Have each prompt answered under each of these adapters, in one batch; compare each with its trainer."""
            asked = [(prompt, name) for prompt in prompts for name in of_names]
            given, names = [prompt for prompt, _ in asked], [name for _, name in asked]
            outputs = llm.generate(given, params, lora_request=names, use_tqdm=False)
            for name, trainer in of_names.items():
                own = [output for output, (_, each) in zip(outputs, asked, strict=True) if each == name]
                compare(own, lambda version, trainer=trainer: trainer, 1.0, counts)
            return outputs

        outputs = run({"x": old, None: weights.of(0), "y": other})
        assert llm.llm_engine.stats.pictures.num_encoded == 3, "once for each adapter, and once for none"
        ids = [output.prompt_token_ids for output in outputs], [output.outputs[0].token_ids for output in outputs]
        scored = llm.score(*ids, lora="y", pictures=[output.pictures for output in outputs])
        for index in (2, 5):
            np.testing.assert_array_equal(scored[index], outputs[index].outputs[0].logprobs)
        llm.add_lora(new.request("x", revision=1))
        run({"x": new, None: weights.of(0)})
        assert llm.llm_engine.stats.pictures.num_encoded == 4, "the new values alone"
        llm.remove_lora("x")
        llm.remove_lora("y")
        run({None: weights.of(0)})
    assert (counts["compared"], counts["wrong"]) == ((6 + 4 + 2) * 2 * 7, 0)
    for path, child in old.named_modules():
        if isinstance(child, LoraLinear) and not {"language_model", "text_model"}.intersection(path.split(".")):
            child.disable_adapters = True
    compare(outputs[:1], lambda version: old, 1.0, counts)
    assert counts["wrong"], "the control: without those of the tower, log-probs are others"


def test_log_probs_of_prompts_with_pictures_are_the_trainer_s(weights_of):
    weights, rng = weights_of("qwen3_vl", torch.float32), random.Random(8)
    prompts = draw_prompts(weights.source, rng)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    with LLM(str(weights.directory), log_stats=False, max_num_batched_tokens=33) as llm:
        outputs = llm.generate([as_prompt(each) for each in prompts], params, use_tqdm=False)
    batch = batch_of(prompts)
    with torch.no_grad():
        values = exact.token_logprobs(weights.of(0), batch, temperature=1.0).numpy()
    for row, (drawn, output) in enumerate(zip(prompts, outputs, strict=True)):
        np.testing.assert_array_equal(output.prompt_logprobs[1:], values[row, : len(drawn.ids) - 1])


@pytest.mark.parametrize(
    "name",
    [
        "glm4v_moe",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("glm4v", "mistral3 of ministral3", "qwen2_vl", "qwen3_5_moe", "qwen3_vl_moe")
        ),
    ],
)
def test_no_bit_differs_in_other_composites(tmp_path, name):
    """Those without a family of `testing`: their pictures are random arrays, as in the trial at load."""
    model, rng, counts = composite(name), random.Random(name), Counter()
    model.config.image_token_id = 250
    save(model, tmp_path)
    arrays = [tower_trial._sample_picture(model, seed) for seed in (0, 1)]
    source = PictureSource(None, model)
    pictures = [Picture.of({key: value.numpy() for key, value in each.items()}) for each in arrays]
    prompts = [source.prompt(rng, each) for each in (pictures, pictures[1:], pictures[:1] * 2, [])]
    params = SamplingParams(max_tokens=8, n=3, logprobs=0, ignore_eos=True, seed=2)
    small = dict(max_num_batched_tokens=11, max_num_seqs=5, num_kv_blocks=128, skip_tokenizer_init=True)
    with LLM(str(tmp_path), log_stats=False, dtype="float32", deterministic=True, **small) as llm:
        outputs = llm.generate([as_prompt(each) for each in prompts], params, use_tqdm=False)
    trainer = exact.load(tmp_path)
    compare(outputs, lambda version: trainer, 1.0, counts)
    assert (counts["compared"], counts["wrong"]) == (4 * 3 * 8, 0)
    samples = [(drawn, sample) for drawn, output in zip(prompts, outputs, strict=True) for sample in output.outputs]
    batch = batch_of([Drawn(drawn.ids + sample.token_ids, drawn.placed) for drawn, sample in samples])
    with torch.no_grad():
        ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
        one = exact.token_logprobs(trainer, batch, temperature=1.0)
        other = exact.token_logprobs(trainer, ids, mask, **exact.inputs(batch))
    assert torch.equal(one, other)
