"""Features of an engine in the exact trainer, adapters of its vision tower, and towers that are sharded."""

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorStack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from rollout_engine import exact
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.model.pictures.encoder import PictureEncoder
from rollout_engine.rollouts.picture_features import _by_digest
from rollout_engine.testing.tiny_pictures import tiny_vision_model
from tests.drawn_pictures import Drawn, batch_of, packed_batch_of
from tests.unit.exact import test_pictures
from tests.unit.exact.test_pictures import FAMILIES, FAMILY, draw_rows, plain_logprobs
from tests.unit.peft_layers import PeftModel, tower_linears

source_of = test_pictures.source_of
QUICK = [("qwen3_vl", torch.float32), ("idefics3", torch.bfloat16)]


def with_features(batch, model):
    """A rollout with the features that an engine with the tower of `model` hands out."""
    encoder = PictureEncoder(model, next(model.parameters()).dtype, 1 << 30)
    pictures = {each.picture.digest: each.picture for row in batch["pictures"] for each in row}
    found = _by_digest(list(pictures.values()), encoder.encode_arrays(list(pictures.values())))
    rows = [tuple(found[each.picture.digest] for each in row) for row in batch["pictures"]]
    batch["picture_features"] = NonTensorStack(*rows)
    return batch


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=[] if (family, dtype) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_a_frozen_tower_takes_features_of_the_same_bits_and_encodes_nothing(family, dtype, source_of, monkeypatch):
    rows = draw_rows(source_of(family), f"features {family}")
    trainer = exact.enable(tiny_vision_model(family, dtype=dtype))
    for name, parameter in trainer.named_parameters():
        parameter.requires_grad_(name.startswith(("model.language_model.", "model.text_model.")))
    padded, packed = (with_features(batch, trainer) for batch in (batch_of(rows), packed_batch_of(rows)))
    text = next(each for each in trainer.parameters() if each.requires_grad)

    def computed(features):
        trainer.zero_grad()
        ids, mask = padded["tokens", "full"], padded["masks", "all_attention_mask"]
        values = exact.token_logprobs(trainer, ids, mask, **exact.inputs(padded, features=features))
        values.sum().backward()
        given = exact.inputs(packed, features=features)
        of_packed = exact.token_logprobs(trainer, packed["tokens", "full"], cu_seqlens=packed["cu_seqlens"], **given)
        given = exact.inputs(padded, features=features)
        logits = trainer(input_ids=ids, attention_mask=mask.long(), use_cache=False, **given).logits
        return values.detach(), of_packed.detach(), logits.detach()[mask], text.grad.clone()

    expected = computed(False)
    monkeypatch.setattr(type(trainer.base_model), "get_image_features", None)
    for ours, theirs in zip(computed(True), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_features_of_an_engine_are_refused_unless_the_trainer_would_compute_them(source_of):
    rows = draw_rows(source_of(FAMILY), "held")
    model = exact.enable(tiny_vision_model(FAMILY)).requires_grad_(False)
    batch = batch_of(rows)
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    with pytest.raises(RequestError, match="add_picture_features"):
        exact.inputs(batch, features=True)
    given = exact.inputs(with_features(batch, model), features=True)
    assert exact.inputs(batch_of([Drawn([5, 6], ())]), features=True) == {}

    def refused(error, match, model, ids=ids, mask=mask, **others):
        with pytest.raises(error, match=match):
            exact.token_logprobs(model, ids, mask, **(given | others))

    exact.token_logprobs(model, ids, mask, **given)
    refused(RequestError, "for token ids|of token ids of shape", model, ids[:2], mask[:2])
    refused(RequestError, "pixel_values.*left out next to picture_features", model, pixel_values=ids)
    refused(RequestError, r"exact.inputs\(batch, features=True\)", model, picture_features=ids)
    rounded = exact.enable(tiny_vision_model(FAMILY, dtype=torch.bfloat16)).requires_grad_(False)
    refused(ConfigError, "of another vision tower .*bfloat16", rounded)
    visual = model.model.visual
    bias = visual.merger.linear_fc2.bias
    bias.requires_grad_(True)
    refused(ConfigError, r"'merger.linear_fc2.bias' requires a gradient", model)
    with torch.no_grad():
        exact.token_logprobs(model, ids, mask, **given)
        bias.add_(1.0)
    bias.requires_grad_(False)
    refused(ConfigError, "of another vision tower .*Push the trainer's weights", model)
    adapted = exact.enable(PeftModel(tiny_vision_model(FAMILY), targets=("qkv",)))
    adapted.requires_grad_(False)
    refused(ConfigError, "the vision tower has 'default'", adapted)
    for each in adapted.adapters():
        each.disable_adapters = True
    exact.token_logprobs(adapted, ids, mask, **given)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral3", "idefics3"))]
)
def test_an_adapter_of_the_tower_learns_as_in_float64(family, source_of):
    batch = batch_of(draw_rows(source_of(family), "tower"))
    targets = tower_linears(tiny_vision_model(family))

    def adapted(dtype):
        torch.manual_seed(3)
        return PeftModel(tiny_vision_model(family, std=0.1).to(dtype), targets, rank=2, alpha=1).to(dtype)

    trainer, plain = exact.enable(adapted(torch.float32)), adapted(torch.float64)
    values = exact.token_logprobs(trainer, batch, temperature=1.0)
    values.sum().backward()
    expected = plain_logprobs(plain.get_base_model(), batch)
    expected.sum().backward()
    assert (values - expected).norm() < 2e-4 * expected.norm()
    theirs, num_compared = dict(plain.named_parameters()), 0
    for name, parameter in trainer.named_parameters():
        if parameter.grad is not None:
            error, size = (parameter.grad - theirs[name].grad).norm(), theirs[name].grad.norm()
            assert error < 2e-4 * size + 1e-5, f"{name}: {error:.1e} of {size:.1e}"
            num_compared += "language_model" not in name and "text_model" not in name
    assert num_compared >= 8


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # the head's logits are a view
def test_a_sharded_tower_is_refused_unless_the_wrapped_model_gathers_it(source_of, tmp_path):
    batch = batch_of(draw_rows(source_of(FAMILY), "sharded"))
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    expected = exact.token_logprobs(exact.enable(tiny_vision_model(FAMILY)), batch, temperature=1.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model, mesh = exact.enable(tiny_vision_model(FAMILY)), init_device_mesh("cpu", (1,))
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(ConfigError, match=r"is sharded \(FSDP\).*model\(input_ids"):
            exact.token_logprobs(model, batch, temperature=1.0)
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False, **exact.inputs(batch)).logits
        values = exact.logprobs_of(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)
        assert torch.equal(values[mask[:, 1:]], expected[mask[:, 1:]])
        values[mask[:, 1:]].sum().backward()
        assert all(each.grad is not None for each in model.model.visual.merger.parameters())
        wholly = exact.enable(tiny_vision_model(FAMILY))
        fully_shard(wholly.model.visual, mesh=mesh)
        fully_shard(wholly, mesh=mesh)
        with pytest.raises(ConfigError, match=r"is sharded \(FSDP\)"):
            wholly(input_ids=ids, attention_mask=mask.long(), use_cache=False, **exact.inputs(batch))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds the group, whose end in a child that another thread forks is a crash


def test_one_row_of_a_rollout_is_refused_with_how_to_take_it(source_of):
    batch = batch_of(draw_rows(source_of(FAMILY), "row"))
    batch.batch_size = [4]
    trainer = exact.enable(tiny_vision_model(FAMILY))
    for call in (lambda row: exact.token_logprobs(trainer, row, temperature=1.0), exact.inputs):
        with pytest.raises(RequestError, match=r"must be \[B, T\].*one sequence alone is batch\[i : i \+ 1\]"):
            call(batch[0])
        call(batch[0:1])
