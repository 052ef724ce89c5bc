"""Sequences end at ids of the checkpoint and of its tokenizer; a tokenizer that is too large is named at start-up."""

import json
from types import SimpleNamespace

import pytest

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.llm import LLM
from rollout_engine.testing import byte_tokenizer, tiny_checkpoint
from rollout_engine.text.input_processor import InputProcessor
from rollout_engine.text.tokenizer import TextCodec

EOS = 2


def end_ids_with(tokenizer, named=(), vocab_size=259, **params):
    sizes = SimpleNamespace(
        max_model_len=64,
        vocab_size=vocab_size,
        eos_token_ids=list(named),
        generates=True,
        pooling=None,
        routing=None,
        pictures=None,
    )
    codec = None if tokenizer is None else TextCodec(tokenizer)
    inputs = InputProcessor.from_config(EngineConfig(model="some"), codec, sizes)
    return inputs.admit(inputs.check([5], SamplingParams(**params))).eos_token_ids


def test_end_ids_of_the_checkpoint_and_the_tokenizer_end_sequences(caplog):
    assert end_ids_with(byte_tokenizer(), named=[7, EOS]) == [7, EOS]
    assert end_ids_with(None, named=[7, 8]) == [7, 8]
    assert not caplog.records
    assert end_ids_with(byte_tokenizer(), named=[7, 8]) == [7, 8, EOS]
    assert "eos_token_id is [7, 8], the tokenizer's end token '<eos>' (id 2): each of them ends" in caplog.text
    assert end_ids_with(byte_tokenizer(), named=[7, 8], ignore_eos=True) == []


def test_the_tokenizers_end_token_serves_where_the_checkpoint_is_silent(caplog):
    assert end_ids_with(byte_tokenizer()) == [EOS]
    assert "is missing, the tokenizer's end token '<eos>' (id 2): that one ends sequences" in caplog.text
    assert end_ids_with(byte_tokenizer(), ignore_eos=True) == []


def test_an_end_id_beyond_the_vocabulary_is_said_and_left_out(caplog):
    assert end_ids_with(byte_tokenizer(), named=[7, 259, -1]) == [7, EOS]
    assert "eos_token_id [-1, 259] of the checkpoint cannot be sampled: its vocabulary is 259" in caplog.text
    assert end_ids_with(byte_tokenizer(), named=[-1]) == [EOS]


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_no_end_id_at_all_is_said(caplog, has_tokenizer):
    tokenizer = byte_tokenizer() if has_tokenizer else None
    if tokenizer is not None:
        tokenizer.eos_token = None
    assert end_ids_with(tokenizer) == []
    assert caplog.text.count("No id ends a sequence") == 1
    assert ("nor does the tokenizer" in caplog.text) == has_tokenizer


def test_a_tokenizer_larger_than_the_vocabulary_is_said_with_its_first_token_beyond(caplog):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>", "<newer>"])
    assert end_ids_with(tokenizer, named=[EOS], vocab_size=260) == [EOS]
    assert (
        "1 tokens that the model, whose vocabulary is 260, does not know; the first is '<newer>' (id 260)"
        in caplog.text
    )
    caplog.clear()
    end_ids_with(tokenizer, named=[EOS], vocab_size=261)
    assert not caplog.records


@pytest.mark.quick(1)
@pytest.mark.parametrize("named", [None, 200, [200, 201]])
def test_each_of_the_end_ids_ends_a_sequence_when_it_is_sampled(tmp_path, named):
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": named}))
    of_checkpoint = [] if named is None else named if isinstance(named, list) else [named]
    with LLM(str(tmp_path), num_kv_blocks=8, log_stats=False) as llm:
        for end_id in (EOS, *of_checkpoint):
            params = SamplingParams(max_tokens=8, allowed_token_ids=[end_id])
            sample = llm.generate("some", params, use_tqdm=False)[0].outputs[0]
            assert (sample.token_ids, sample.finish_reason) == ([end_id], "stop")
