"""Samples of an evaluation as a Parquet file."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.evaluation.ledger import num_sampled

_COLUMNS = {
    "checkpoint": "string",
    "task": "string",
    "setting": "string",
    "prompt_index": "int64",
    "sample_index": "int64",
    "seed": "uint64",
    "reward": "double",
    "correct": "bool",
    "answer": "string",
    "finish_reason": "string",
    "truncated": "bool",
    "error": "string",
    "num_tokens": "int64",
    "policy_versions": "int64s",
    "prompt": "string",
    "response": "string",
    "prompt_token_ids": "int32s",
    "response_token_ids": "int32s",
    "log_probs": "floats",
}
"""Column -> its type, by pyarrow's alias; of lists with an s."""


def write_parquet(path: str | os.PathLike[str], samples: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> None:
    """Write one row per sample; `notes` go into the file's metadata as JSON."""
    if find_spec("pyarrow") is None:
        advice = 'pip install "rollout-engine[eval]"'
        raise ConfigError(f"Parquet files need the package pyarrow: {advice} installs it.")
    import pyarrow
    import pyarrow.parquet

    def of(kind: str) -> Any:
        is_list = kind.endswith("s")
        one = pyarrow.type_for_alias(kind.removesuffix("s"))
        return pyarrow.list_(one) if is_list else one

    schema = pyarrow.schema([(name, of(kind)) for name, kind in _COLUMNS.items()])
    metadata = {name: json.dumps(value) for name, value in notes.items()}
    table = pyarrow.Table.from_pylist([_row(sample) for sample in samples], schema=schema.with_metadata(metadata))
    pyarrow.parquet.write_table(table, os.fspath(path))


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    evaluation = sample["evaluation"]
    sampled = [version for version in sample["policy_version"] if version >= 0]
    own = {name: _text(sample.get(name)) for name in _COLUMNS if name in sample}
    return own | {
        **{name: _text(evaluation[name]) for name in ("checkpoint", "task", "setting", "correct", "answer")},
        "prompt_index": sample["group_id"],
        "num_tokens": num_sampled(sample),
        "policy_versions": sorted(set(sampled)),
    }


def _text(value: Any) -> Any:
    """Halves of surrogate pairs, which UTF-8 cannot hold, become question marks."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
