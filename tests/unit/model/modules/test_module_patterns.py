"""Foreign modules are recognised by what they compute."""

import pytest
import torch
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMLP
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from rollout_engine.model.modules.module_patterns import (
    children_of_one_dtype,
    gated_mlp_names,
    gated_norm_options,
    is_gated_mlp,
    offset_norm_epsilon,
    rms_norm_epsilon,
    single_norm_epsilon,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Qwen3RMSNorm])
def test_norms_of_the_formula_are_recognised_whatever_their_weight(norm, dtype):
    for weight in (0.0, 1.0):
        module = norm(64, eps=1e-5).to(dtype)
        nn.init.constant_(module.weight, weight)
        assert rms_norm_epsilon(module) == 1e-5
        assert (module.weight == weight).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "module", [GemmaRMSNorm(64), nn.LayerNorm(64), nn.LayerNorm(64, bias=False), nn.Linear(64, 64)]
)
def test_other_norms_are_left_alone(module, dtype):
    assert rms_norm_epsilon(module.to(dtype)) is None


def test_norms_that_round_once_are_recognised():
    for norm in (NemotronHRMSNorm, Olmo2RMSNorm):
        for dtype in DTYPES:
            assert single_norm_epsilon(norm(64, eps=1e-5).to(dtype)) == 1e-5
        assert rms_norm_epsilon(norm(64, eps=1e-5).bfloat16()) is None
    assert single_norm_epsilon(LlamaRMSNorm(64).bfloat16()) is single_norm_epsilon(GemmaRMSNorm(64)) is None


def test_gated_mlps_of_other_names_are_recognised():
    small = dict(hidden_size=16, intermediate_size=32)
    lfm2 = Lfm2MLP(Lfm2Config(**small, block_auto_adjust_ff_dim=False))
    granite = GraniteMoeHybridMLP(
        GraniteMoeHybridConfig(hidden_size=16, shared_intermediate_size=32, mamba_n_heads=4, mamba_d_head=8)
    )
    assert gated_mlp_names(lfm2).gate_up == ("w1", "w3")
    assert gated_mlp_names(granite).gate_up == ("input_linear",)
    assert not is_gated_mlp(lfm2) and not is_gated_mlp(granite)
    granite.activation = nn.GELU()
    assert gated_mlp_names(granite) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_that_multiply_by_one_more_than_their_weight_are_recognised(dtype):
    for norm in (GemmaRMSNorm, Qwen3_5RMSNorm):
        assert offset_norm_epsilon(norm(64, eps=1e-5).to(dtype)) == 1e-5
    assert offset_norm_epsilon(LlamaRMSNorm(64).to(dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("module", "gate_first", "activation", "group_size"),
    [
        (Qwen3_5RMSNormGated(64, eps=1e-5), False, "silu", 64),
        (KimiLinearRMSNormGated(64, eps=1e-5), False, "sigmoid", 64),
        (BambaRMSNormGated(64, 16, eps=1e-5), True, "silu", 16),
    ],
)
def test_norms_with_gates_are_recognised(module, gate_first, activation, group_size, dtype):
    options = gated_norm_options(module.to(dtype))
    if dtype == torch.float32:  # where nothing is rounded
        options["rounds_norm"] = None
    rounds_norm = None if dtype == torch.float32 else not isinstance(module, KimiLinearRMSNormGated)
    expected = dict(group_size=group_size, gate_first=gate_first, activation=activation, rounds_norm=rounds_norm)
    assert options == {"epsilon": 1e-5} | expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_modules_are_no_norms_with_gates(dtype):
    class Halved(Qwen3_5RMSNormGated):
        def forward(self, hidden_states, gate):
            return super().forward(hidden_states, gate / 2)

    for module in (Halved(64), LlamaRMSNorm(64), nn.Linear(64, 64)):
        assert gated_norm_options(module.to(dtype)) is None


def test_a_norm_that_rounds_elsewhere_is_left_alone():
    assert rms_norm_epsilon(Olmo2RMSNorm(64).bfloat16()) is None


def test_a_norm_kept_in_float32_is_not_taken_for_one_of_the_activations_dtype():
    embedding, norm, other = nn.Embedding(4, 64), GptOssRMSNorm(64), GptOssRMSNorm(64)
    module = nn.Sequential(embedding, norm, other).half()
    norm.float()  # in float32 its formula is ours; on float16 activations it rounds elsewhere
    assert rms_norm_epsilon(norm) is not None
    assert list(children_of_one_dtype(module)) == [module, embedding, other]


def _mlp(cls=LlamaMLP, **settings):
    return cls(LlamaConfig(hidden_size=32, intermediate_size=40, **settings))


class _Scaled(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 1.01


class _Particular(LlamaMLP):
    def forward(self, x):
        assert x.shape[-1] == 32
        return super().forward(x)


class _Routed(LlamaMLP):
    def forward(self, x, router):
        return super().forward(x)


def test_a_gated_mlp_is_recognised():
    assert is_gated_mlp(_mlp())
    assert is_gated_mlp(_mlp(mlp_bias=True).bfloat16())


@pytest.mark.parametrize(
    "module",
    [_mlp(_Scaled), _mlp(_Routed), _mlp(_Particular), _mlp(hidden_act="gelu"), nn.Linear(4, 4)],
    ids=lambda m: type(m).__name__,
)
def test_other_mlps_are_left_alone(module):
    assert not is_gated_mlp(module)


def test_a_trial_draws_nothing_from_torchs_generator():
    mlp, norm = _mlp(), LlamaRMSNorm(64)
    state = torch.get_rng_state()
    assert is_gated_mlp(mlp)
    assert rms_norm_epsilon(norm) is not None
    assert torch.equal(torch.get_rng_state(), state)


class _Clamped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=100.0)) * self.up_proj(x))


def test_a_limit_of_large_activations_is_seen():
    mlp = _mlp()
    mlp.__class__ = _Clamped
    assert not is_gated_mlp(mlp)


@pytest.mark.parametrize(("module", "recognised"), [(_mlp(), is_gated_mlp), (LlamaRMSNorm(64), rms_norm_epsilon)])
def test_a_module_with_a_buffer_is_left_alone(module, recognised):
    assert recognised(module)
    module.register_buffer("shift", torch.zeros(()))
    assert not recognised(module)
