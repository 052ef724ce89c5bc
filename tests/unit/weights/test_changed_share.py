"""The report of an update says what share of the weights it has changed."""

import logging
import random

import pytest
import torch
from safetensors.torch import load_file

import sync
from rollout_engine import LLM
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.testing import tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import SIZES
from rollout_engine.weights import changed_share, known_weights
from rollout_engine.weights.update import apply_update
from sync.change_notice import ChangeNotice
from tests.small_pieces import small_pieces
from tests.unit.sync.adapted import LoraLinear

OPTIONS = dict(num_kv_blocks=16, max_model_len=64, log_stats=False, dtype="bfloat16")


@torch.no_grad()
def nudge(model, share, seed):
    """Change about this share of the elements of every weight; returns the exact one."""
    generator = torch.Generator().manual_seed(seed)
    changed = total = 0
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < share
        parameter[chosen] = parameter[chosen] * 1.25 + 1e-3
        changed, total = changed + int(chosen.sum()), total + parameter.numel()
    return changed / total


@pytest.mark.quick(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_it_is_close_to_the_exact_share_from_the_first_update_on(tmp_path, tied, delta):
    model = tiny_model("qwen3", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True, **OPTIONS) as llm:
        for seed, share in enumerate((0.3, 0.02, 0.6)):
            exact = nudge(model, share, seed)
            assert llm.update_weights(model, delta=delta).changed_share == pytest.approx(exact, rel=0.1)
        assert llm.update_weights(model, delta=delta).changed_share == 0
        report = llm.update_weights(model, version=llm.policy_version)
        assert (report.num_tensors, report.changed_share) == (0, 0)
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.update_weights(model, delta=delta).changed_share is None, "the values before are forgotten"
        assert llm.update_weights(model, delta=delta).changed_share == 0


def test_a_part_counts_by_its_size_and_other_names_are_not_compared(tmp_path):
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **SIZES["qwen3_moe"])
    model.save_pretrained(tmp_path / "model")
    file = load_file(tmp_path / "model" / "model.safetensors")
    with LLM(tmp_path / "model", skip_tokenizer_init=True, **OPTIONS) as llm:
        head = {"lm_head.weight": file["lm_head.weight"] + 1}
        expected = head["lm_head.weight"].numel() / model.num_parameters()
        assert llm.update_weights(head, partial=True).changed_share == pytest.approx(expected)
        assert llm.update_weights(file).changed_share is None, "experts arrived stacked before"
        assert llm.update_weights(file).changed_share == 0


def test_after_pieces_the_elements_are_those_that_are_live(make_updater, steps, monkeypatch):
    monkeypatch.setattr(known_weights, "_LEAST_UNCHANGED", 0.0)
    monkeypatch.setattr(changed_share, "_NUM_COLUMNS", 5)
    live = {"a": torch.zeros(40, 10), "b": torch.zeros(300), "c": torch.zeros(3, 70, 4), "d": torch.zeros(90, 7)}
    choose, updater = random.Random(0), make_updater(live)
    source = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    with small_pieces():
        for version in range(1, 12):
            before = {name: tensor.clone() for name, tensor in source.items()}
            for _ in range(version if version > 1 else 0):
                tensor = choose.choice(list(source.values())).view(-1)
                tensor[choose.randrange(len(tensor))] += 1
            sender = sync.make_sender("inproc")
            manifest = sender.offer(source, version, updater.metadata())
            report = apply_update(
                updater, manifest, sync.make_receiver("inproc", sender=sender), steps, UpdateOptions()
            )
            assert 0 <= report.changed_share <= 1 and (report.num_bytes_sent < report.num_bytes or version == 1)
            for name, elements in updater._changes._live.items():
                assert torch.equal(elements, changed_share._elements_of(live[name])), (version, name)
            exact = sum(int((source[n] != before[n]).sum()) for n in source) / sum(map(torch.numel, source.values()))
            assert abs(report.changed_share - exact) < 0.02


def test_the_report_says_that_adapters_were_merged_and_such_updates_are_not_warned_of(tmp_path, caplog):
    path = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    trainer = tiny_model(dtype=torch.bfloat16)
    with LLM(path, max_loras=2, **OPTIONS) as llm, caplog.at_level(logging.WARNING):
        assert llm.update_weights(trainer).adapter is None
        for layer in trainer.model.layers:
            layer.mlp.down_proj = LoraLinear(layer.mlp.down_proj.requires_grad_(False)).bfloat16()
            torch.nn.init.normal_(layer.mlp.down_proj.lora_B["default"].weight, std=1e-3)
        report = llm.update_weights(trainer)
    assert report.adapter == "merged" and 0 < report.changed_share < 0.05
    assert "merge=False" in caplog.text and "float32 masters" not in caplog.text


def test_bfloat16_weights_that_hardly_move_are_warned_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(ChangeNotice, "trainer_has_masters", False)
    tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    models = {dtype: tiny_model(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    with LLM(tmp_path, **OPTIONS) as llm, caplog.at_level(logging.WARNING):
        llm.update_weights(models[torch.float32])
        for dtype, seed in ((torch.float32, 1), (torch.bfloat16, 2), (torch.bfloat16, 3)):
            nudge(models[dtype], 0.01, seed)
            llm.update_weights(models[dtype])
    monkeypatch.setattr(ChangeNotice, "trainer_has_masters", True)
    ChangeNotice().warn_if_hardly_changed([("w", torch.zeros(8, dtype=torch.bfloat16))], 0.01)
    found = [record.getMessage() for record in caplog.records if "float32 masters" in record.getMessage()]
    assert len(found) == 1 and "% of the weights, which the trainer holds in 16 bits" in found[0]


@pytest.mark.parametrize("dtype, share", [(torch.float32, 0.01), (torch.bfloat16, 0.0), (torch.bfloat16, 0.2)])
def test_other_updates_are_not_warned_of(dtype, share, caplog):
    ChangeNotice().warn_if_hardly_changed([("w", torch.zeros(8, dtype=dtype))], share)
    assert not caplog.records


def test_a_module_whose_few_trained_weights_all_move_is_not_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(ChangeNotice, "trainer_has_masters", False)
    tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    trainer = tiny_model(dtype=torch.bfloat16).requires_grad_(False)
    trained = trainer.model.layers[0].self_attn.o_proj.weight.requires_grad_(True)
    with LLM(tmp_path, **OPTIONS) as llm, caplog.at_level(logging.WARNING):
        llm.update_weights(trainer)
        with torch.no_grad():
            trained.mul_(1.5)
        report = llm.update_weights(trainer)
    assert 0 < report.changed_share < 0.05
    assert "float32 masters" not in caplog.text
