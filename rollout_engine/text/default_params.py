"""Reads the sampling settings that a checkpoint recommends; they are never applied automatically."""

from transformers import GenerationConfig

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.locations import find_directory
from rollout_engine.base.sampling_params import TRUNCATION_RULES, SamplingParams

_FILE = "generation_config.json"
_SAME = ("temperature", *TRUNCATION_RULES, "repetition_penalty")
_FIELDS = {"max_new_tokens": "max_tokens", **{name: name for name in _SAME}}
"""Hugging Face's names -> those of `SamplingParams`."""


def read_default_params(model: str) -> SamplingParams:
    """Read the sampling settings in the generation_config.json of `model`; those it does not name have our defaults.

    `do_sample: false` there is temperature 0. Raises `ConfigError` for a file that cannot be read and `RequestError`
    for a value out of bounds.
    """
    try:
        directory = find_directory(model, weights=False)
    except ConfigError:  # it is on the engine's machine, not on this one
        return SamplingParams()
    try:
        found = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as problem:  # a broken file may raise anything
        if (directory / _FILE).is_file():
            raise ConfigError(f"{directory / _FILE} cannot be read: {problem}") from problem
        if not isinstance(problem, OSError):
            raise
        return SamplingParams()
    values = {ours: getattr(found, theirs, None) for theirs, ours in _FIELDS.items()}
    if found.do_sample is False:
        values["temperature"] = 0.0
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
