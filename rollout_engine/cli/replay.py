"""Makes logged rollouts again, token by token and bit by bit, or says where they differ and what may be why.

    rollout-engine replay rollouts.jsonl --sample 12
    rollout-engine replay rollouts.jsonl --sample 12 --explain --token 5
    rollout-engine replay rollouts.jsonl --weights steps/100 --weights steps/200 num_threads=2

The file is one of `rollout(log_to=...)`. Its lines name the model, the dtype and the digests of the weights; weights of
versions that a trainer has pushed are looked for among those of --weights. The exit status is 1 where a sample differs.

--explain makes nothing again and needs no model: it tells which step of the engine drew a token, with which batch
mates, cache hits, preemptions and versions, from the trace that EngineConfig(step_trace=...) makes an engine write.
"""

import argparse
from pathlib import Path
from typing import Any

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.batches.rollout_files import read_jsonl
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.terminal import announce, number_of
from rollout_engine.rollouts.explain import explain
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.rollouts.replay import replay, require_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `replay`."""
    parser.add_argument("file", type=Path, help="a file of rollout(log_to=...)")
    parser.add_argument("--sample", type=int, metavar="K", help="only the sample in this line, the first being 0")
    parser.add_argument("--model", help="checkpoint directory or hub id; default: the one that the lines name")
    parser.add_argument("--weights", action="append", default=[], metavar="DIR", help="a checkpoint of a later version")
    parser.add_argument("--explain", action="store_true", help="which step drew a token of --sample, and what it met")
    parser.add_argument("--token", type=int, metavar="P", help="for --explain: its place in the response (0)")
    parser.add_argument("--trace", metavar="DIR", help="for --explain: its directory; default: the one of the lines")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the outcomes of the samples. Returns 1 if one differs."""
    overrides, samples = parse_overrides(arguments.overrides), read_jsonl(_one_file(arguments.file))
    if not samples:
        raise RequestError(f"{arguments.file} has no rollouts.")
    if arguments.explain:
        return _explain(arguments, samples)
    for name in ("token", "trace"):
        if getattr(arguments, name) is not None:
            raise RequestError.for_field(f"--{name}", getattr(arguments, name), "absent without --explain")
    if arguments.sample is not None:
        samples = _choose_samples(samples, arguments.sample)
    if overrides.sampling:
        raise RequestError(f"{next(iter(overrides.sampling))}: the lines themselves say how they were sampled.")
    for sample in samples:
        require_log(sample)
    logged = samples[0]["engine"]
    options: dict[str, Any] = {name: logged[name] for name in ("dtype", "fp32_head", "deterministic")}
    options["quantization"] = logged.get("quantization")  # lines of older versions have none
    options |= {"logits_processors": tuple(logged["logits_processors"])} | overrides.engine
    with announce(f"loading {arguments.model or logged['model']}"):
        policy = _policy(arguments.model, logged["model"], options)
    with policy, announce(f"making {number_of(len(samples), 'sample')} again"):
        reports = replay(policy, samples, arguments.weights)
    for report in reports:
        if len(reports) == 1 or not report.is_equal:
            print(report)
    num_equal = sum(report.is_equal for report in reports)
    print(f"{num_equal} of {len(reports)} samples made again, equal to the bit")
    return int(num_equal < len(reports))


def _policy(given: str | None, logged: str, options: dict[str, Any]) -> RolloutPolicy:
    try:
        return RolloutPolicy.from_pretrained(given or logged, **options)
    except ConfigError as problem:
        if given is not None or Path(logged).is_dir():
            raise
        raise ConfigError(f"{problem} The lines name it so; --model says where it is now.") from None


def _one_file(path: Path) -> Path:
    """The file. Raises `RequestError` for a directory, with the files in it."""
    if not path.is_dir():
        return path
    found = ", ".join(str(file) for file in sorted(path.rglob("*.jsonl"))[:5])
    raise RequestError.for_field("file", str(path), "one file of rollouts", f"In this directory: {found or 'none'}.")


def _explain(arguments: argparse.Namespace, samples: list[dict[str, Any]]) -> int:
    if arguments.sample is None:
        raise RequestError("--explain needs --sample K: the line of the sample, the first being 0.")
    [sample] = _choose_samples(samples, arguments.sample)
    directory = arguments.trace or (sample.get("engine") or {}).get("step_trace")
    if directory is None:
        raise RequestError(
            "--explain: the lines name no trace. Give its directory by --trace, or let the engine write one by "
            "EngineConfig(step_trace=DIR) the next time."
        )
    print(explain(sample, arguments.token or 0, directory, samples)[1])
    return 0


def _choose_samples(samples: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    if not 0 <= index < len(samples):
        raise RequestError.for_field("--sample", index, f"from 0 to {len(samples) - 1}")
    return [samples[index]]
