"""The sampling settings that a checkpoint recommends: read when asked for, never applied by themselves."""

from pathlib import Path

from transformers import GenerationConfig

from rollout_engine.errors import ConfigError
from rollout_engine.sampling_params import SamplingParams

_FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Hugging Face's names -> ours."""


def read_default_params(model: str) -> SamplingParams:
    """Sampling settings that the generation_config.json of `model` recommends; the defaults where it is silent.

    `do_sample: false` there is temperature 0. Raises `ConfigError` for a file that cannot be read and `RequestError`
    for a value out of bounds.
    """
    try:
        found = GenerationConfig.from_pretrained(model)
    except OSError as problem:
        if (Path(model) / _FILE).is_file():
            raise ConfigError(f"{Path(model) / _FILE} cannot be read: {problem}") from problem
        return SamplingParams()
    values = {ours: getattr(found, theirs, None) for theirs, ours in _FIELDS.items()}
    if found.do_sample is False:
        values["temperature"] = 0.0
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
