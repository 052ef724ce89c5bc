"""TorchRL's version, and its `generate_kwargs` as our sampling params."""

from collections.abc import Mapping
from typing import Any

from envs_adapters.trainers.package import Package
from rollout_engine.base.errors import ConfigError, unknown_name
from rollout_engine.base.sampling_params import SamplingParams

TORCHRL = Package("TorchRL", "torchrl", "0.14")

_NAMES = {"max_new_tokens": "max_tokens", "stop_sequences": "stop", "num_return_sequences": "n"}
"""TorchRL's names of settings that we have under another one."""
_OURS = frozenset("seed logprobs prompt_logprobs logprob_token_ids output_kind".split())
"""Settings that the policy sets itself."""
_KNOWN = frozenset(SamplingParams.__struct_fields__) - _OURS
_NO_CHANGE: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True, None),
    "num_beams": (1, None),
    "length_penalty": (1, 1.0, None),
    "early_stopping": (False, None),
    "logprobs": (True, None),
}
"""TorchRL's settings that have no equal here, and their values that ask for nothing."""


def sampling_params(*generate_kwargs: Mapping[str, Any]) -> SamplingParams:
    """`generate_kwargs` of TorchRL's wrappers as sampling params; fields of `SamplingParams` may stand among them.

    Later ones override earlier ones. Log-probs are those of the distribution at temperature 1 unless `logprobs_mode`
    is set otherwise: TorchRL's wrappers of trained models have no other. Raises `ConfigError` for options without
    equal, `RequestError` for wrong values.
    """
    settings: dict[str, Any] = {"logprobs_mode": "raw"}
    for given in generate_kwargs:
        settings |= _rename_settings(given)
    return SamplingParams(**settings, logprobs=0)


def _rename_settings(generate_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under our names."""
    settings: dict[str, Any] = {}
    for name, value in generate_kwargs.items():
        if (name, value) == ("do_sample", False):
            ours, value = "temperature", 0.0
        elif value in _NO_CHANGE.get(name, ()):
            continue
        else:
            ours = _NAMES.get(name, name)
        if name in _OURS or (name in _NO_CHANGE and ours == name):
            raise ConfigError(f"generate_kwargs={{{name!r}: {value!r}}} has no equal in this engine.{_advice(name)}")
        if ours not in _KNOWN:
            raise ConfigError(f"generate_kwargs: {unknown_name('setting', name, _KNOWN | _NAMES.keys())}")
        if settings.setdefault(ours, value) != value:
            raise ConfigError(
                f"generate_kwargs has {ours}={settings[ours]!r} and {name}, which asks for {ours}={value!r}. Leave one "
                "out."
            )
    return settings


def _advice(name: str) -> str:
    return " Give seed= to the policy instead." if name == "seed" else " Leave it out."
