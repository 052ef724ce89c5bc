"""Every causal LM that transformers has: served right, or refused with a reason. Never served wrong, never a traceback.

Each type is made tiny with one generic recipe; a type that transformers itself does not build from it is skipped.
"""

import copy
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.errors import ConfigError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES

SERVED = set(
    """
    afmoe apertus arcee aria_text axk1 bamba beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hy_v3 hyperclovax internlm3 iquestcoder jais2
    jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2
    minimax_m3_vl_text ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron nemotron_h olmo olmo2
    olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()
)
"""What is known to be served, so that a change which refuses one of these is seen."""

_MOST_PARAMETERS = 8_000_000
_COMMON = dict(vocab_size=259, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_FIELDS = (
    _COMMON
    | dict(tie_word_embeddings=False)
    | dict.fromkeys(["hidden_size", "d_model", "n_embd", "word_embed_proj_dim"], 64)
    | dict.fromkeys(["n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"], 2)
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4)
    | dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff"], 96)
    | dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim"], 96)
    | dict.fromkeys(["max_position_embeddings", "n_positions"], 256)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 40)
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4)
    | dict(num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)
    | dict(num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=16, sliding_window=19)
    | dict.fromkeys(["head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"], 16)
    | dict.fromkeys(["mamba_d_state", "state_size"], 8)
)
SCALED = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=48, llama_4_scaling_beta=0.3)
_LEFT_WHERE_UNSET = {"sliding_window", "head_dim", "moe_intermediate_size", "q_lora_rank"}


def recipes(model_type):
    """Fields for a config of this type, the likeliest first."""
    for sizes in (SIZES, HYBRID_SIZES):
        if model_type in sizes:
            yield _COMMON | sizes[model_type]
    try:
        default = AutoConfig.for_model(model_type)
    except Exception:  # it cannot be made without arguments
        return
    given = {}
    for name, value in _FIELDS.items():
        try:
            current = getattr(default, name)
        except Exception:  # it has none, or one for each layer
            continue
        if current is not None or name not in _LEFT_WHERE_UNSET:
            given[name] = value
    yield given
    if "num_key_value_heads" in given:
        yield given | {"num_key_value_heads": 4}
        yield {name: value for name, value in given.items() if name not in ("head_dim", "num_key_value_heads")}


def tiny_models(model_type):
    """Random models of this type, one for each recipe that transformers can build and run."""
    for fields in recipes(model_type):
        try:
            config = AutoConfig.for_model(model_type, **fields)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > _MOST_PARAMETERS:
                continue
            model = _random_model(config)
        except Exception:  # whatever transformers does with a configuration that does not fit
            continue
        yield model


def _random_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
    return model


def draw_prompts(seed):
    """Different lengths, past the windows and original lengths; the last continues another one."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (1, 9, 31, 70, 40)]
    return [*prompts, prompts[3][:64] + [9, 8]]


def with_scaled_positions(model, directory):
    """A model like it whose rotary embeddings, and queries where it scales them, are others from position 48 on.

    None if it has no such embeddings, or transformers does not build or save it.
    """
    config = copy.deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    is_by_kind = all(isinstance(each, dict) for each in rope.values())
    config.rope_parameters = {k: each | SCALED for k, each in rope.items()} if is_by_kind else rope | SCALED
    try:
        made = _random_model(config)
        made.save_pretrained(directory)
    except Exception:  # whatever transformers does with a configuration that does not fit
        return None
    return made


@torch.no_grad()
def assert_right(directory, outputs):
    """Log-probs, and the choice of each token, are those of one eager forward."""
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    for output in outputs:
        sample = output.outputs[0]
        tokens = torch.tensor([output.prompt_token_ids + sample.token_ids])
        logits = reference(tokens, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        allowed = 1e-4 * max(1.0, float(logits.abs().max()))
        chosen = torch.tensor(sample.token_ids)[:, None]
        assert (logits.amax(-1) - logits.gather(1, chosen)[:, 0]).max() < allowed
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=allowed, rtol=0)


PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
SMALL = dict(max_num_batched_tokens=33, num_kv_blocks=16, block_size=16, max_model_len=128, num_threads=1)


def serve(model, directory, seed):
    """Outputs of an engine that serves `model`. Raises `ConfigError`."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    with LLM(str(directory), dtype="float32", log_stats=False, **SMALL) as llm:
        return llm.generate(draw_prompts(seed), PARAMS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # transformers' own, about sizes that no real checkpoint has
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_it_is_served_right_or_refused_with_the_reason(model_type, tmp_path):
    refusals = []
    for i, model in enumerate(tiny_models(model_type)):
        directory = tmp_path / str(i)
        try:
            outputs = serve(model, directory, model_type)
        except ConfigError as refusal:
            refusals.append(str(refusal))
            continue
        assert_right(directory, outputs)
        return
    assert model_type not in SERVED, refusals
    if not refusals:
        pytest.skip("transformers builds no tiny model from the generic recipe")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", sorted(SERVED))
def test_it_is_served_right_beyond_the_original_length(model_type, tmp_path):
    for i, model in enumerate(tiny_models(model_type)):
        directory = tmp_path / str(i)
        if (scaled := with_scaled_positions(model, directory)) is None:
            continue
        try:
            outputs = serve(scaled, directory, model_type)
        except ConfigError:
            continue
        assert_right(directory, outputs)
        return
    pytest.skip("no tiny model has such rotary embeddings")
