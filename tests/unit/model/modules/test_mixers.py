"""Mixers are recognised by the functions over tokens that their forward calls, and call ours in their place."""

import logging

import pytest
import torch
from torch import nn

from rollout_engine import exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.admission.gate import admit
from rollout_engine.model.admission.self_check import check_numerics
from rollout_engine.model.loading import loader
from rollout_engine.model.modules import mixer_functions
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mixers import MixerConvolution, is_mixer, mixers_of, swap_mixers, unserved_mixers
from rollout_engine.model.modules.state_geometry import StateCall, StateGeometry, states_by_layer
from rollout_engine.testing import tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES


def build(architecture, **overrides):
    return tiny_model(architecture, **(HYBRID_SIZES[architecture] | overrides))


STATES = {
    "qwen3_5_text": StateGeometry(((3, 80),), (4, 8, 12)),
    "olmo_hybrid": StateGeometry(((3, 80),), (4, 8, 12)),
    "kimi_linear": StateGeometry(((3, 144),), (4, 12, 12)),
    "bamba": StateGeometry(((3, 128),), (6, 8, 16)),
    "lfm2": StateGeometry(((2, 48),)),
}


@pytest.mark.parametrize("architecture", STATES)
def test_the_probe_finds_the_states_of_each_layer(architecture):
    module = build(architecture)
    names = list(module.state_dict())
    swap_mixers(module)
    geometry = probe_geometry(module)
    assert [layer.state for layer in geometry] == [STATES[architecture], None, STATES[architecture]]
    assert [layer.attends for layer in geometry] == [False, True, False]
    assert list(module.state_dict()) == names


def test_a_layer_may_have_both_or_neither():
    module = build("falcon_h1")
    swap_mixers(module)
    assert all(layer.attends and layer.state is not None for layer in probe_geometry(module))
    module = build("nemotron_h")
    swap_mixers(module)
    found = [(layer.attends, layer.state is not None) for layer in probe_geometry(module)]
    assert found == [(False, True), (False, False), (True, False), (False, False), (False, True)]


def test_other_modules_are_no_mixers():
    module = tiny_model("qwen3", **SIZES["qwen3"])
    swap_mixers(module)
    assert not any(map(is_mixer, module.modules()))
    assert mixers_of(module) == []
    assert unserved_mixers(module) == []


def test_a_mixer_with_another_function_over_tokens_is_refused_by_name():
    module = tiny_model("jamba", num_experts=2, num_experts_per_tok=1, mamba_d_state=8, use_mamba_kernels=False)
    swap_mixers(module)
    assert mixers_of(module) == []
    with pytest.raises(ConfigError, match="JambaMambaMixer calls"):
        admit(module)
    with pytest.raises(ConfigError, match="cannot be exact"):
        exact.enable(module)


def test_the_convolution_of_a_mixer_is_not_called():
    module = build("lfm2")
    swap_mixers(module)
    convolution = mixers_of(module)[0].conv
    assert isinstance(convolution, MixerConvolution)
    with pytest.raises(ConfigError, match="Call the mixer"):
        convolution(torch.zeros(1, 48, 3))


def test_a_swapped_module_computes_what_its_class_does():
    module, theirs = build("bamba"), build("bamba")
    swap_mixers(module)
    ids = torch.arange(3, 60).view(3, 19)
    with torch.no_grad():
        ours = module(input_ids=ids, use_cache=True).logits
        expected = theirs(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


class Layer(nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (dict(activation="tanh"), "activation='tanh'"),
        (dict(strange=torch.zeros(1)), "passes strange to causal_conv1d_fn"),
    ],
)
def test_arguments_of_a_convolution_that_are_not_known_are_refused(call, reason):
    with mixer_functions.running(Layer()), pytest.raises(ConfigError, match=reason):
        mixer_functions.causal_conv1d_fn(torch.zeros(1, 4, 5), torch.zeros(4, 3), **call)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (dict(initial_state=torch.zeros(1)), "passes initial_state to the gated delta rule"),
        (dict(output_final_state=True), "Pass use_cache=False"),
    ],
)
def test_a_recurrence_is_given_no_state(call, reason):
    q, rate = torch.zeros(1, 5, 2, 4), torch.zeros(1, 5, 2)
    with mixer_functions.running(Layer()), pytest.raises(ConfigError, match=reason):
        mixer_functions.gated_delta_rule(q, q, q, rate, rate, **call)


def test_calls_that_do_not_fit_together_are_refused():
    calls = [StateCall(0, 1, recurrence=(1, 2, 3)), StateCall(0, 1, recurrence=(1, 2, 3))]
    with pytest.raises(ValueError, match="two recurrences"):
        states_by_layer(calls)
    with pytest.raises(ValueError, match="two modules"):
        states_by_layer([StateCall(0, 1, convolution=(3, 8)), StateCall(0, 2, convolution=(3, 8))])
    with pytest.raises(ValueError, match="no layer_idx"):
        states_by_layer([StateCall(None, 1, convolution=(3, 8))])


def test_states_are_counted_in_bytes():
    state = StateGeometry(((3, 80), (2, 5)), (4, 8, 12))
    assert state.bytes_of(torch.bfloat16) == 2 * (240 + 10) + 4 * 384
    assert state.without_counts() == (3, 2, (8, 12))


def test_layers_with_states_are_not_cut_over_devices():
    module = build("lfm2")
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM has layers that keep a state, which one device computes"):
        loader._admit(module, module.config, torch.device("cuda", 0), has_ranks=True)
    assert loader._admit(module, module.config, torch.device("cuda", 0), has_ranks=False)[0].state is not None


def test_the_check_of_numbers_passes_on_no_advice_to_install_packages(monkeypatch):
    """Transformers' own forward advises once to install kernels, which ours replace; the check runs it."""
    advice = []
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: advice.append(record.getMessage()))
    logger.addHandler(handler)
    try:
        logging.Logger.warning_once.cache_clear()
        module = build("lfm2")
        swap_mixers(module)
        check_numerics(module, probe_geometry(module))
        assert not advice
        logging.Logger.warning_once.cache_clear()
        build("lfm2")(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        assert any("falling back" in each for each in advice)
    finally:
        logger.removeHandler(handler)
