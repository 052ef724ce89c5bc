"""Models as PEFT, Accelerate and transformers' Trainer hold them: they are sent as they compute, or refused."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_engine import RolloutPolicy
from rollout_engine.base.errors import ManifestMismatchError
from rollout_engine.testing import tiny_checkpoint, tiny_model
from sync.errors import ManifestMismatch
from sync.lazy_tensor import materialized
from sync.source import read_source

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = Path(__file__).parent
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
MERGED = {
    "rslora": lambda: peft.LoraConfig(**LORA, use_rslora=True),
    "ranks": lambda: peft.LoraConfig(**LORA, rank_pattern={"q_proj": 8}, alpha_pattern={"v_proj": 3}),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "saved": lambda: peft.LoraConfig(**LORA, modules_to_save=["norm", "lm_head"]),
    "tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
    "embeddings": lambda: peft.LoraConfig(**LORA | {"target_modules": ["embed_tokens", "lm_head"]}),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], init_weights=False, oft_block_size=4, r=0),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], init_weights=False, r=4),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
REFUSED = {
    "alora": (lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[1]), "q_proj' cannot be merged.*plain LoRA"),
    "lily": (lambda: peft.LilyConfig(target_modules=["q_proj"], r=4), "q_proj' cannot be merged.*plain LoRA"),
    "prompt": (lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "trains a prompt"),
    "adaption": (
        lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"),
        r"\(ADAPTION_PROMPT\) trains a prompt",
    ),
}


def sent(source):
    return {name: materialized(tensor) for name, tensor in read_source(source)}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", MERGED)
def test_adapters_are_merged_with_the_bits_of_peft_and_nothing_of_the_trainer_changes(kind):
    model = peft.get_peft_model(tiny_model("llama", seed=3), MERGED[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.requires_grad * 0.01)
    before = copy.deepcopy(model.state_dict())
    assert_equal(sent(model), copy.deepcopy(model).merge_and_unload().state_dict())
    assert_equal(model.state_dict(), before)


def test_several_parameters_of_one_module_of_experts_are_merged():
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(**LORA, target_parameters=parameters)
    model = peft.get_peft_model(tiny_model("qwen3_moe", seed=3), config)
    assert_equal(sent(model), copy.deepcopy(model).merge_and_unload().state_dict())


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_weights_equal_is_refused_by_name(kind):
    make, message = REFUSED[kind]
    with pytest.raises(ManifestMismatch, match=message):
        sent(peft.get_peft_model(tiny_model("llama", seed=3), make()))


def test_an_adapter_on_one_of_two_tied_weights_is_refused_by_an_engine_that_ties_them(tmp_path):
    config = peft.LoraConfig(**LORA | {"target_modules": ["embed_tokens"]})
    model = peft.get_peft_model(tiny_model("qwen2", seed=3, tie_word_embeddings=True), config)
    with RolloutPolicy.from_pretrained(
        tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True), dtype="float32"
    ) as policy:
        with pytest.raises(ManifestMismatchError, match="tied in the engine.*tie_word_embeddings=False"):
            policy.update_weights(model)
        assert policy.policy_version == 0


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_adapters_over_a_quantised_base_are_refused(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny_model("llama", seed=3)
    layer = model.model.layers[0].self_attn
    options = {} if kind == "Linear4bit" else {"has_fp16_weights": False}
    quantised = getattr(bitsandbytes.nn, kind)(64, 64, bias=False, **options)
    quantised.load_state_dict(layer.q_proj.state_dict())
    layer.q_proj = quantised.to("cpu")
    with pytest.raises(ManifestMismatch, match=r"q_proj\.base_layer\.weight' is quantised by bitsandbytes"):
        read_source(peft.get_peft_model(model, peft.LoraConfig(**LORA | {"target_modules": ["q_proj"]})))


def test_a_trainer_is_refused_and_the_model_that_it_holds_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = peft.get_peft_model(tiny_model("qwen2", seed=3), peft.LoraConfig(**LORA))
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(model=model, args=arguments)
    with pytest.raises(ManifestMismatch, match=r"not from Trainer\. Pass its \.model"):
        read_source(trainer)
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    assert_equal(sent(trainer.model), expected)
    assert_equal(sent(trainer.accelerator.prepare(trainer.model)), expected)


@pytest.mark.parametrize("kind", ["ddp", "ddp-peft", "fsdp2", "fsdp2-peft"])
def test_models_that_accelerate_has_prepared_are_read_as_the_plain_ones(kind, tmp_path):
    pytest.importorskip("accelerate")
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "accelerated_trainer.py"), kind, str(tmp_path / "rendezvous")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
