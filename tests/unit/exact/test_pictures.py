"""The exact trainer with pictures: transformers' values, one set of bits in every layout, gradients, refusals."""

import random

import pytest
import torch

from rollout_engine import exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.model.admission import tower_trial
from rollout_engine.model.modules.composites import TextPart
from rollout_engine.model.modules.packed_rows import REACH, TOKEN_POSITIONS
from rollout_engine.testing.tiny_pictures import FAMILIES, tiny_vision_checkpoint, tiny_vision_model
from tests.drawn_pictures import Drawn, PictureSource, batch_of, draw_text, packed_batch_of, plain_logits
from tests.integration.composites import composite
from tests.unit.peft_layers import PeftModel

FAMILY = "qwen3_vl"
"""With positions on three axes, and features for several layers."""
QUICK = {"qwen3_vl", "idefics3"}


def named(families):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in families]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """source_of(family) -> draws its pictures and prompts."""
    made = {}

    def make(family):
        if family not in made:
            directory = tiny_vision_checkpoint(tmp_path_factory.mktemp(family), family)
            made[family] = PictureSource(directory, tiny_vision_model(family))
        return made[family]

    return make


def draw_rows(source, name, *, num_answer=7):
    """Rows of three prompts: two samples of one with two pictures, one without any, and one with a single picture."""
    rng = random.Random(name)
    first, other = (source.draw_picture(rng) for _ in range(2))
    shared, plain, single = (
        source.prompt(rng, [first, other]),
        Drawn(draw_text(rng, 30), ()),
        source.prompt(rng, [first]),
    )
    return [Drawn(ids + draw_text(rng, num_answer), placed) for ids, placed in (shared, plain, shared, single)]


def plain_logprobs(model, batch):
    """Log-probs by transformers' own forward, [B, T - 1]."""
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    logprobs = plain_logits(model, batch)[:, :-1].log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]


def one_by_one(trainer, rows):
    return [exact.token_logprobs(trainer, batch_of([row]), temperature=1.0).detach()[0] for row in rows]


@pytest.mark.parametrize("family", named(FAMILIES))
def test_values_are_those_of_transformers(family, source_of):
    batch = batch_of(draw_rows(source_of(family), family))
    with torch.no_grad():
        expected = plain_logprobs(tiny_vision_model(family), batch)
        values = exact.token_logprobs(exact.enable(tiny_vision_model(family)), batch, temperature=1.0)
    torch.testing.assert_close(values, expected, atol=2e-4, rtol=0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", named(FAMILIES))
@torch.no_grad()
def test_every_layout_and_form_has_the_bits_of_rows_alone(family, dtype, source_of):
    rows = draw_rows(source_of(family), family)
    trainer = exact.enable(tiny_vision_model(family, dtype=dtype))
    alone = one_by_one(trainer, rows)
    right, left, packed = batch_of(rows), batch_of(rows, is_left=True), packed_batch_of(rows)
    ids, mask = right["tokens", "full"], right["masks", "all_attention_mask"]
    forward = trainer(input_ids=ids, attention_mask=mask.long(), use_cache=False, **exact.inputs(right)).logits
    found = [
        exact.token_logprobs(trainer, right, temperature=1.0),
        exact.token_logprobs(trainer, ids, mask, **exact.inputs(right)),
        exact.token_logprobs_and_entropies(trainer, right, temperature=1.0)[0],
        exact.logprobs_of(forward[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1),
    ]
    for values in found:
        for row, expected in enumerate(alone):
            assert torch.equal(values[row, : len(expected)], expected)
    for values in (
        exact.token_logprobs(trainer, left, temperature=1.0),
        exact.token_logprobs(
            trainer, left["tokens", "full"], left["masks", "all_attention_mask"], **exact.inputs(left)
        ),
    ):
        for row, expected in enumerate(alone):
            assert torch.equal(values[row, values.shape[1] - len(expected) :], expected)
    positions = torch.cat([torch.arange(len(row)) for row, _ in rows])[None]
    for values in (
        exact.token_logprobs(trainer, packed, temperature=1.0),
        exact.token_logprobs(trainer, packed["tokens", "full"], position_ids=positions, **exact.inputs(packed)),
    ):
        for start, expected in zip(packed["cu_seqlens"].tolist(), alone, strict=False):
            assert torch.equal(values[0, start : start + len(expected)], expected)


def test_equal_prompts_are_computed_once_and_other_pictures_apart(source_of, monkeypatch):
    source, rng = source_of(FAMILY), random.Random(1)
    trainer = exact.enable(tiny_vision_model(FAMILY))
    picture, other = source.picture(1, 40, 32), source.picture(2, 40, 32)
    ids, placed = source.prompt(rng, [picture])
    swapped = (PlacedPicture(placed[0].start, placed[0].end, other),)
    answers = [draw_text(rng, 5) for _ in range(4)]
    rows = [Drawn(ids + answer, placed) for answer in answers] + [Drawn(ids + answers[0], swapped)]
    alone, sizes = one_by_one(trainer, rows), []
    trainer.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    calls, encode = [], type(trainer.base_model).get_image_features
    monkeypatch.setattr(
        type(trainer.base_model), "get_image_features", lambda *args, **kw: calls.append(1) or encode(*args, **kw)
    )
    values = exact.token_logprobs(trainer, batch_of(rows), temperature=1.0)
    for row, expected in enumerate(alone):
        assert torch.equal(values[row, : len(expected)], expected)
    assert not torch.equal(values[0], values[4]), "the pictures differ"
    assert len(calls) == 2
    num_shared_at_most = placed[0].start  # of the row with the other picture
    assert sizes == [sum(len(row) for row, _ in rows) - 3 * len(ids) - num_shared_at_most]


@torch.no_grad()
@pytest.mark.parametrize("family", [FAMILY, "gemma4"])
def test_a_sampled_placeholder_is_an_ordinary_token(family, source_of):
    source, rng = source_of(family), random.Random(2)
    trainer = exact.enable(tiny_vision_model(family))
    ids, placed = source.prompt(rng, [source.picture(1, 40, 32)])
    row = Drawn([*ids, source.token, 7, source.token, source.token], placed)
    batch = batch_of([row, Drawn([5, source.token, 6], ())])
    values = exact.token_logprobs(trainer, batch, temperature=1.0)
    given = exact.inputs(batch)
    assert given["mm_token_type_ids"].sum() == placed[0].end - placed[0].start
    again = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"], **given)
    assert torch.equal(values, again)
    text = exact.token_logprobs(trainer, torch.tensor([[5, source.token, 6]]))
    assert torch.equal(values[1, :2], text[0])
    # Its embedding is the table's: with another row there, what follows it changes, and what is before it does not.
    trainer.get_input_embeddings().weight[source.token] += 1.0
    moved = exact.token_logprobs(trainer, batch, temperature=1.0)
    differ = (moved != values)[0, : len(row.ids) - 1]
    assert differ.nonzero()[0] == len(ids), "the token behind the first sampled placeholder"


@pytest.mark.parametrize("family", named(sorted(FAMILIES.keys() - {"kimi_k25"})))  # whose experts are not in float64
def test_gradients_of_text_and_tower_are_those_of_float64(family, source_of):
    batch = batch_of(draw_rows(source_of(family), family))
    trainer, plain = exact.enable(tiny_vision_model(family, std=0.1)), tiny_vision_model(family, std=0.1).double()
    exact.token_logprobs(trainer.train(), batch, temperature=1.0).sum().backward()
    plain_logprobs(plain.train(), batch).sum().backward()
    theirs, num_compared = dict(plain.named_parameters()), 0
    for name, parameter in trainer.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            error, size = (parameter.grad - expected).norm(), expected.norm()
            assert error < 2e-4 * size + 1e-5, f"{name}: {error:.1e} of {size:.1e}"
            num_compared += "language_model" not in name
    assert num_compared > 10


@pytest.mark.quick(1)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", [FAMILY, pytest.param("gemma3", marks=pytest.mark.slow)])
def test_recomputed_layers_have_the_same_gradients(family, use_reentrant, source_of):
    batch, found = batch_of(draw_rows(source_of(family), "recomputed")), []
    for checkpoints in (False, True):
        model = exact.enable(tiny_vision_model(family)).train()
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        values = exact.token_logprobs(model, batch, temperature=1.0)
        values.sum().backward()
        found.append((values.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        other = found[1][1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(other, gradient, atol=1e-4, rtol=1e-3)


def test_a_layer_that_was_not_told_how_far_a_picture_goes_is_refused(source_of):
    trainer = exact.enable(tiny_vision_model("gemma3"))
    forget = {REACH: None}
    for layer in trainer.model.language_model.layers:
        layer.register_forward_pre_hook(lambda module, args, given: (args, given | forget), with_kwargs=True)
    rows = draw_rows(source_of("gemma3"), "gemma3")
    with pytest.raises(ConfigError, match="Gemma3Attention was not given token_reach"):
        exact.token_logprobs(trainer, batch_of(rows), temperature=1.0)
    exact.token_logprobs(trainer, batch_of([rows[1]]), temperature=1.0)


def test_pictures_side_by_side_are_refused_if_their_tokens_would_see_one_another(source_of):
    source = source_of("gemma3")
    picture = source.picture(1, 40, 32)
    size = source.num_features(picture)
    placed = (PlacedPicture(1, 1 + size, picture), PlacedPicture(1 + size, 1 + 2 * size, picture))
    batch = batch_of([Drawn([5, *[source.token] * 2 * size, 6], placed)])
    trainer = exact.enable(tiny_vision_model("gemma3"))
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    for given in ((batch,), (ids, mask)):
        pictures = {} if len(given) == 1 else exact.inputs(batch)
        with pytest.raises(ValueError, match=f"begins at its token {1 + size}, right behind another one"):
            exact.token_logprobs(trainer, *given, temperature=1.0, **pictures)


def test_an_adapter_of_the_text_learns_while_the_tower_is_frozen(source_of):
    batch = batch_of(draw_rows(source_of(FAMILY), "adapter"))
    base = tiny_vision_model(FAMILY)
    model = exact.enable(PeftModel(base, targets=("q_proj", "down_proj")))
    values = exact.token_logprobs(model, batch, temperature=1.0)
    values.sum().backward()
    with_gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradients and all("lora_" in name and "visual" not in name for name in with_gradients)
    for each in model.adapters():
        each.disable_adapters = True
    assert not torch.equal(values, exact.token_logprobs(model, batch, temperature=1.0))


def test_pictures_that_do_not_fit_are_refused_with_numbers_and_rows(source_of):
    source = source_of(FAMILY)
    trainer = exact.enable(tiny_vision_model(FAMILY))
    rows = draw_rows(source, "refused")
    batch = batch_of(rows)
    ids, mask, given = batch["tokens", "full"], batch["masks", "all_attention_mask"], exact.inputs(batch)

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            exact.token_logprobs(trainer, ids, mask, **(given | changes))

    fewer, grids = given["pixel_values"], given["image_grid_thw"]
    size = int(grids[-1].prod())
    refused(r"row 3, tokens 0 to \d+: it has \d+ placeholder tokens \(id 261\), and the pictures end behind 0",
            pixel_values=fewer[:-size], image_grid_thw=grids[:-1])  # fmt: skip
    refused(r"placeholder tokens \(id 261\) of all rows end behind 5 of them",
            pixel_values=torch.cat([fewer, fewer[-size:]]), image_grid_thw=torch.cat([grids, grids[-1:]]))  # fmt: skip
    refused("describes pictures of .* patches, and pixel_values has", pixel_values=fewer[:-1])
    refused("without pixel_values", pixel_values=None)
    refused(r"mm_token_type_ids must be integers \(4, \d+\)", mm_token_type_ids=given["mm_token_type_ids"][:, 1:])
    refused("videos and audio are not served", mm_token_type_ids=given["mm_token_type_ids"] * 2)
    refused("pixel_values_videos", pixel_values_videos=fewer)
    with pytest.raises(ValueError, match="left out: the batch has it"):
        exact.token_logprobs(trainer, batch, temperature=1.0, **given)
    with pytest.raises(ValueError, match=r"picture 0 has \d+ features, and its span \[0, 1\)"):
        wrong = (PlacedPicture(0, 1, rows[0].placed[0].picture),)
        exact.token_logprobs(trainer, batch_of([Drawn(rows[0].ids, wrong)]), temperature=1.0)
    with pytest.raises(ValueError, match="pixel_values_videos"):
        trainer(input_ids=ids, attention_mask=mask.long(), pixel_values_videos=fewer, video_grid_thw=grids)
    exact.token_logprobs(trainer, ids, mask, **given)


def test_models_without_an_exact_tower_refuse_pictures_with_the_cause(source_of):
    batch = batch_of(draw_rows(source_of(FAMILY), "plain"))
    with pytest.raises(ValueError, match="was not given to exact.enable, and pictures are computed by exact models"):
        exact.token_logprobs(tiny_vision_model(FAMILY), batch, temperature=1.0)


def test_layers_that_lose_the_positions_of_tokens_are_refused_with_pictures():
    """GLM-4V's mixtures hand attention positions on three axes: by these alone, a picture's tokens are sequences."""
    model = composite("glm4v_moe")
    model.config.image_token_id = 250
    source = PictureSource(None, model)
    arrays = tower_trial._sample_picture(model, 0)
    picture = Picture.of({name: value.numpy() for name, value in arrays.items()})
    batch = batch_of([source.prompt(random.Random(0), [picture])])
    decoder = TextPart.of(exact.enable(model)).decoder
    exact.token_logprobs(model, batch, temperature=1.0)

    def lose(module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != TOKEN_POSITIONS}

    decoder.register_forward_pre_hook(lose, with_kwargs=True)
    with pytest.raises(ConfigError, match="positions on three axes alone"):
        exact.token_logprobs(model, batch, temperature=1.0)
