import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.cpu.flat_batch import SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.loading import loader
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.testing import tiny_checkpoint, tiny_config, tiny_model
from rollout_engine.testing.architectures import SIZES

FAMILIES = ["llama", "qwen2", "qwen3"]
NATIVE = {"avx512_bf16": True}


def load(directory, **options) -> LoadedModel:
    return load_model(EngineConfig(model=str(directory), **options))


def edit_json(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory, edit) -> None:
    """Rewrite the checkpoint's one file with `edit(tensors)` applied to its dict."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_same_weights(loaded: LoadedModel, state: dict[str, torch.Tensor]) -> None:
    ours = loaded.module.state_dict()
    assert ours.keys() == state.keys()
    assert [name for name in ours if not torch.equal(ours[name], state[name])] == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_holds_what_from_pretrained_holds(tmp_path, architecture, tied):
    tiny_checkpoint(tmp_path, architecture, tie_word_embeddings=tied)
    loaded = load(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(loaded, reference.state_dict())
    ours, theirs = dict(loaded.module.named_buffers()), dict(reference.named_buffers())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("architecture", sorted(SIZES.keys() - FAMILIES))
def test_every_architecture_loads_from_shards_with_a_tied_head(tmp_path, architecture):
    model = tiny_model(architecture, **SIZES[architecture] | dict(tie_word_embeddings=True))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_weights(load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())


@pytest.mark.quick(5)
@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_eager_attention(tmp_path, architecture, row_invariant):
    tiny_checkpoint(tmp_path, architecture, tie_word_embeddings=architecture == "qwen2")
    loaded = load(tmp_path)
    if row_invariant:
        make_row_invariant(loaded.module)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = list(range(3, 103))
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids])).logits[0]
    model = CpuModel(loaded.module, loaded.geometry, num_blocks=8, block_size=16)
    blocks = [5, 2, 7, 0, 1, 6, 3]
    chunks = [(0, 37), (37, 90), *((i, i + 1) for i in range(90, 100))]
    got = [model.forward([SequenceChunk(ids[a:b], a, blocks)], range(b - a)) for a, b in chunks]
    assert torch.allclose(torch.cat(got), expected, rtol=0, atol=1e-4)


def test_shards_make_the_same_model(tmp_path):
    tiny_checkpoint(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert_same_weights(load(tmp_path / "parts"), load(tmp_path / "whole").module.state_dict())


def test_a_tied_head_may_be_in_the_file(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    expected = load(tmp_path).module.state_dict()
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    loaded = load(tmp_path)
    assert_same_weights(loaded, expected)
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert loaded.aliases == [["model.embed_tokens.weight", "lm_head.weight"]]


def test_only_the_head_of_a_tied_pair_may_be_in_the_file(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    expected = load(tmp_path).module.state_dict()
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert_same_weights(load(tmp_path), expected)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ConfigError, match="differ, but the configuration ties them"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_floats_are_converted_to_nearest_even(tmp_path, stored, asked):
    tiny_checkpoint(tmp_path, "qwen2", dtype=stored)
    loaded = load(tmp_path, dtype=asked)
    expected = {
        name: tensor.to(loaded.dtype) for name, tensor in tiny_model("qwen2", dtype=stored).state_dict().items()
    }
    assert loaded.dtype == getattr(torch, asked)
    assert_same_weights(loaded, expected)


@pytest.mark.parametrize(
    ("stored", "capabilities", "expected"),
    [
        (torch.float32, NATIVE, torch.float32),
        (torch.bfloat16, NATIVE, torch.bfloat16),
        (torch.bfloat16, {"amx_bf16": True}, torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": False}, torch.float32),
        (torch.float16, NATIVE, torch.float32),
    ],
)
def test_the_automatic_dtype_is_the_checkpoints_where_the_cpu_has_it(
    tmp_path, monkeypatch, stored, capabilities, expected
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    tiny_checkpoint(tmp_path, dtype=stored)
    assert load(tmp_path).dtype == expected


def test_the_automatic_dtype_is_read_from_the_weights_when_the_configuration_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: NATIVE)
    tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    edit_json(tmp_path / "config.json", dtype=None)
    assert load(tmp_path).dtype == torch.bfloat16


def test_float16_is_refused_with_advice(tmp_path):
    tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="dtype='float16' .*'bfloat16'"):
        load(tmp_path, dtype="float16")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_targets_are_the_live_storage(tmp_path, architecture):
    tiny_checkpoint(tmp_path, architecture)
    loaded = load(tmp_path)
    assert loaded.targets.keys() == loaded.module.state_dict().keys()
    loaded.targets["model.layers.1.self_attn.k_proj.weight"].fill_(3.0)
    assert bool((loaded.module.model.layers[1].self_attn.k_proj.weight == 3.0).all())


def test_fused_projections_are_slices_of_one_buffer(tmp_path):
    tiny_checkpoint(tmp_path)
    loaded = load(tmp_path)
    attention = loaded.module.model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storages) == 1


def test_the_module_is_ready_to_serve(tmp_path):
    tiny_checkpoint(tmp_path)
    loaded = load(tmp_path)
    assert not loaded.module.training
    assert not any(p.requires_grad for p in loaded.module.parameters())
    assert len(loaded.geometry) == 2
    assert (loaded.vocab_size, loaded.max_model_len) == (259, 2048)


class TestDummyWeights:
    def make(self, directory, **overrides) -> None:
        tiny_config("qwen3", **overrides).save_pretrained(directory)

    def test_need_only_a_configuration_and_are_the_same_each_time(self, tmp_path):
        self.make(tmp_path, num_hidden_layers=3)
        first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
        assert_same_weights(first, second.module.state_dict())
        assert first.dtype == torch.float32

    def test_do_not_disturb_the_callers_random_numbers(self, tmp_path):
        self.make(tmp_path)
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        load(tmp_path, load_format="dummy")
        assert torch.equal(torch.rand(1), expected)

    def test_have_the_spread_the_configuration_names(self, tmp_path):
        self.make(tmp_path, initializer_range=0.02)
        for name, tensor in load(tmp_path, load_format="dummy").module.state_dict().items():
            if "norm" in name:
                assert bool((tensor == 1.0).all())
            else:
                assert 0.018 < float(tensor.std()) < 0.022

    def test_ignore_weights_that_are_there(self, tmp_path):
        tiny_checkpoint(tmp_path)
        stored = load(tmp_path).module.lm_head.weight
        assert not torch.equal(load(tmp_path, load_format="dummy").module.lm_head.weight, stored)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensor missing: model\.norm\.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), r"1 tensor not in the model: model\.extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"model\.norm\.weight: expected \[64\].*\[65\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}), r"model\.norm\.weight.*I64"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, edit, message):
    tiny_checkpoint(tmp_path)
    edit_tensors(tmp_path, edit)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    tiny_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short: tensor '"):
        load(tmp_path)


def test_rotary_frequencies_of_old_files_are_ignored(tmp_path):
    tiny_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_same_weights(load(tmp_path), tiny_model("llama").state_dict())


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no config.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[1, 2]", b'{"model_type": "no-such-type"}', b"{}", b'{"\xff": 1}', b'{"a": ' + b"[" * 100_000],
    ids=["cut", "list", "unknown", "empty", "no-text", "deep"],
)
def test_a_configuration_that_is_not_one_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        load(tmp_path)


class TestCodeInTheCheckpoint:
    @pytest.fixture
    def trap(self, tmp_path):
        """A checkpoint whose own code, if run, leaves a file behind."""
        tiny_checkpoint(tmp_path)
        (tmp_path / "modeling_trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
        auto_map = {"AutoConfig": "modeling_trap.Config", "AutoModelForCausalLM": "modeling_trap.Model"}
        edit_json(tmp_path / "config.json", auto_map=auto_map)
        yield tmp_path
        assert not (tmp_path / "sprung").exists()

    def test_is_refused_for_an_unknown_type(self, trap):
        edit_json(trap / "config.json", model_type="trap")
        with pytest.raises(ConfigError, match="'trap' needs code shipped with the checkpoint .* never run"):
            load(trap)

    def test_is_not_run_for_a_known_type(self, trap):
        assert type(load(trap).module).__module__.startswith("transformers.")


class TestTypeReadAsAnother:
    KIMI = dict(auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, model_type="kimi_k2")
    KIMI |= dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, aux_loss_alpha=0.001, seq_aux=True)

    @pytest.fixture
    def kimi(self, tmp_path):
        tiny_checkpoint(tmp_path, "deepseek_v3", **SIZES["deepseek_v3"])
        edit_json(tmp_path / "config.json", **self.KIMI)
        return tmp_path

    def test_has_the_layers_of_that_type(self, kimi):
        loaded = load(kimi)
        assert type(loaded.module).__name__ == "DeepseekV3ForCausalLM"
        edit_json(kimi / "config.json", model_type="deepseek_v3")
        assert_same_weights(loaded, AutoModelForCausalLM.from_pretrained(kimi).state_dict())

    def test_is_served(self, kimi):
        with LLM(str(kimi), log_stats=False) as llm:
            (output,) = llm.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3

    @pytest.mark.parametrize(
        ("field", "value", "reason"),
        [
            ("scoring_func", "softmax", "computes as if scoring_func were 'sigmoid', and it is 'softmax'"),
            ("query_norm", True, "whose configuration has no query_norm"),
        ],
    )
    def test_is_refused_for_a_field_that_may_change_the_layers(self, kimi, field, value, reason):
        edit_json(kimi / "config.json", **{field: value})
        with pytest.raises(ConfigError, match=reason):
            load(kimi)

    def test_is_refused_for_weights_of_other_layers(self, kimi):
        edit_tensors(kimi, lambda tensors: tensors.update({"model.layers.0.self_attn.gate.weight": torch.zeros(2, 2)}))
        with pytest.raises(ConfigError, match=r"self_attn\.gate\.weight"):
            load(kimi)

    def test_layers_that_only_draft_are_left_out(self, tmp_path):
        tiny_checkpoint(tmp_path, "qwen2")
        edit_json(
            tmp_path / "config.json",
            model_type="mimo",
            architectures=["MiMoForCausalLM"],
            num_nextn_predict_layers=1,
            attention_bias=True,
            use_mrope=False,
        )
        expected = Qwen2ForCausalLM.from_pretrained(tmp_path).state_dict()
        edit_tensors(
            tmp_path, lambda tensors: tensors.update({"model.mtp_layers.0.input_proj.weight": torch.ones(2, 2)})
        )
        assert_same_weights(load(tmp_path), expected)


@pytest.mark.parametrize(("stored", "expected"), [(7, [7]), ([7, 9], [7, 9]), (None, [2])])
def test_end_ids_come_from_the_generation_configuration(tmp_path, stored, expected):
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stored, "top_p": 0.5}))
    assert load(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(("stored", "expected"), [(5, [5]), ([5, 6], [5, 6]), (None, [])])
def test_end_ids_fall_back_to_the_configuration(tmp_path, stored, expected):
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", eos_token_id=stored)
    assert load(tmp_path).eos_token_ids == expected


def test_end_ids_that_are_none_are_refused(tmp_path):
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id='</s>'"):
        load(tmp_path)


def test_a_length_past_the_checkpoints_is_refused(tmp_path):
    tiny_checkpoint(tmp_path)
    assert load(tmp_path, max_model_len=2048).max_model_len == 2048
    with pytest.raises(ConfigError, match="max_model_len=2049 .*up to 2048"):
        load(tmp_path, max_model_len=2049)


def test_dynamic_rotary_frequencies_are_served_up_to_the_original_length(tmp_path, caplog):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }
    tiny_checkpoint(tmp_path, "llama", rope_parameters=rope)
    assert load(tmp_path).max_model_len == 256
    assert "past 256" in caplog.text
    with pytest.raises(ConfigError, match="up to 256"):
        load(tmp_path, max_model_len=257)


def test_an_unserved_architecture_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path, "diffllama")
    monkeypatch.setattr(loader.WeightTable, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="diffllama.*cannot be served exactly"):
        load(tmp_path)


def test_a_length_is_asked_for_only_where_nothing_else_is_in_the_way(tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(loader, "position_limit", lambda config: None)
    with pytest.raises(ConfigError, match="does not say how long a sequence may be.*pass max_model_len, for example"):
        load(tmp_path)
    assert load(tmp_path, max_model_len=99).max_model_len == 99


def test_an_unserved_architecture_is_not_asked_for_a_length(tmp_path):
    tiny_model("bloom", n_head=4, n_layer=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'bloom'.*cannot be served exactly"):
        load(tmp_path)
