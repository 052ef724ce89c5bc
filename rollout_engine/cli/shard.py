"""Writes a model's weights with one file for each rank, so that engines of as many ranks load their parts alone.

    rollout-engine shard Qwen/Qwen3-0.6B sharded tensor_parallel_size=2 dtype=bfloat16

Then EngineConfig(model="sharded", load_format="sharded", tensor_parallel_size=2) has the weights of the model, to the
bit. The directory must not be there yet, or be empty. Engines save what they have after updates themselves, by
save_sharded_state.
"""

import argparse
import os
from pathlib import Path

from rollout_engine import LLM
from rollout_engine.base.errors import ConfigError
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.terminal import announce
from rollout_engine.model.loading.sharded_state import ShardedState, require_new

_SMALL = {"skip_tokenizer_init": True, "log_stats": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `shard`."""
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("directory", help="where to write; it must not be there yet, or be empty")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Load the model and write its weights."""
    overrides = parse_overrides(arguments.overrides)
    if overrides.sampling:
        names = ", ".join(overrides.sampling)
        raise ConfigError(f"{names}: nothing is sampled; shard takes fields of EngineConfig.")
    directory = Path(os.path.abspath(arguments.directory))
    require_new(directory)  # before the model is loaded, which may take minutes
    with announce(f"loading {arguments.model}"):
        engine = LLM(arguments.model, **(_SMALL | overrides.engine))
    with engine, announce(f"writing {directory}"):
        engine.save_sharded_state(str(directory))
    num_stages = int(overrides.engine.get("pipeline_parallel_size", 1))
    num_ranks = len(list(directory.glob("rank-*.safetensors"))) // num_stages
    hint = f"{arguments.directory}: load it with load_format=sharded tensor_parallel_size={num_ranks}"
    hint += f" pipeline_parallel_size={num_stages}" if num_stages > 1 else ""
    if num_ranks > 1 and num_stages == 1:
        has_columns = ShardedState.read(directory, num_ranks).has_columns
        hint += f", on devices with{'out' * has_columns} deterministic=True"
    print(hint)
