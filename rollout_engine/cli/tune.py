"""Measures engine options on this machine, and proposes those that are faster for a model by more than the noise.

    rollout-engine tune Qwen/Qwen3-0.6B --out tuned.toml
    rollout-engine tune path/of/config --file prompts.jsonl n=8 max_tokens=256 load_format=dummy

Compared with their defaults are num_threads, max_num_batched_tokens, max_num_seqs and speculation, each in rounds that
take turns with rounds of the default. An option that is given (dtype=float32) holds in all of them and is not tried.
The prompts come again in every round, as those of a training do, with other seeds and an empty prefix cache. They are
random tokens; what speculation gains depends on the text, so give prompts of yours by --prompt or --file.

`EngineConfig.load("tuned.toml")` reads what --out writes, and so do commands: config=tuned.toml.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.cli import machine
from rollout_engine.cli.bench import SAMPLING, random_prompts
from rollout_engine.cli.out_file import check_out, write_out
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.prompts import add_prompts, read_prompts
from rollout_engine.cli.tuning import Comparison, Options, Proposal, Round, Trial, propose

_ENGINE = {"log_stats": False}
_BUDGETS = (512, 2048, 32768)
_SEQUENCES = (32, 64, 128, 512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `tune`."""
    parser.add_argument("model", help="checkpoint directory or hub id; with load_format=dummy its config is enough")
    add_prompts(parser)
    parser.add_argument("--prompts", type=int, default=8, help="random prompts per round, without yours (8)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each (64)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of rounds for each value (5)")
    parser.add_argument("--seconds", type=float, default=600, help="begin no further comparison after so long (600)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the proposal; printed without it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write or print the proposal."""
    for name in ("prompts", "prompt_tokens", "rounds", "seconds"):
        if not getattr(arguments, name) > 0:
            raise RequestError.for_field(f"--{name.replace('_', '-')}", getattr(arguments, name), "above 0")
    if arguments.out is not None:
        check_out(arguments.out, "tuned.toml")
    overrides = parse_overrides(arguments.overrides)
    given = overrides.engine
    config = EngineConfig(model=arguments.model, **(_ENGINE | given))
    if config.device == "cuda":
        raise ConfigError("tune measures two engines beside each other, so far only on a CPU: leave device=cuda out.")
    params = SamplingParams(**(SAMPLING | overrides.sampling))
    if params.max_tokens is None:
        raise RequestError.for_field("max_tokens", None, "a number: rounds are compared by their tokens")
    prompts, lengths = _prompts(arguments, config)
    trials = [trial for trial in _trials(lengths, params.n, config) if trial.option not in given]
    deadline = time.monotonic() + arguments.seconds
    num_rounds = 2 * (arguments.rounds + 1) * (sum(len(trial.values) for trial in trials) + 1)
    with tqdm(total=num_rounds, desc="tune", unit="round", delay=2, disable=not sys.stderr.isatty()) as bar:
        start = partial(_engine, arguments.model, _ENGINE | given, prompts, params, bar)
        found = propose(trials, start, arguments.rounds, lambda: time.monotonic() > deadline)
    work = f"{len(prompts)}x{params.n}, {sum(lengths) // len(lengths)}+{params.max_tokens} tokens"
    toml = as_toml(arguments.model, work, given, found)
    if arguments.json:
        print(json.dumps(_as_json(arguments.model, work, found), indent=1))
    else:
        print(f"{arguments.model}, {work}, {machine.cpu_name()}, {machine.usable_cpus()} usable CPUs")
        print(table(found))
    if arguments.out is not None:
        write_out(arguments.out, toml)
    elif not arguments.json:
        print(f"\n{toml}", end="")


def as_toml(model: str, work: str, given: Options, found: Proposal) -> str:
    """The proposal as a file that `EngineConfig.load` reads: the model, the given options, and those found faster."""
    lines = [f"# Measured by rollout-engine tune on {machine.cpu_name()}, {machine.usable_cpus()} usable CPUs: {work}."]
    if found.together is not None:
        outcome = _describe(found.together) if found.options else "no faster in rounds of their own, left out"
        lines.append(f"# All proposals together: {outcome}.")
    lines.append(f"model = {json.dumps(os.path.abspath(model) if os.path.isdir(model) else model)}")
    lines += [f"{name} = {_toml_value(value)}" for name, value in given.items() if value is not None]
    lines += [
        f"# {name} = None, which TOML cannot say: give it to EngineConfig.load" for name in given if given[name] is None
    ]
    for trial, compared in found.trials:
        if trial.option in found.options:
            value = found.options[trial.option]
            [chosen] = [each for each in compared if each.options == {trial.option: value}]
            lines.append(f"{trial.option} = {_toml_value(value)}  # {_describe(chosen)}")
        else:
            lines.append(f"# {trial.option}: the default ({trial.default}){_describe_kept(trial, compared)}")
    return "\n".join(lines) + "\n"


def table(found: Proposal) -> str:
    """One line per value: tokens per second next to the default's, their ratio, and the verdict."""
    lines = [f"{'option':24} {'value':>8} {'tokens/s':>10} {'default':>10}  compared with the default"]
    for trial, compared in found.trials:
        lines += [_row(each) for each in compared]
        if trial.left_out:
            lines.append(f"{trial.option:24} {'':8} {'':10} {'':10}  not tried: {trial.left_out}")
    if found.together is not None:
        lines.append(_row(found.together))
    return "\n".join(lines)


def _row(each: Comparison) -> str:
    name, value = next(iter(each.options.items())) if len(each.options) == 1 else ("all of these", "")
    rates = (sorted(rates)[len(rates) // 2] for rates in (each.rates, each.default_rates))
    return f"{name:24} {value!s:>8} {' '.join(f'{rate:10,.0f}' for rate in rates)}  {_describe(each)}"


def _describe(each: Comparison) -> str:
    spread = f"{min(each.ratios):.2f} to {max(each.ratios):.2f} in {len(each.ratios)} pairs"
    kind = "faster" if each.is_faster else "slower" if each.is_slower else "within the noise"
    return f"{each.ratio:.2f} times ({spread}): {kind}"


def _describe_kept(trial: Trial, compared: Sequence[Comparison]) -> str:
    if not compared:
        return f", not tried: {trial.left_out}"
    best = max(compared, key=lambda each: each.ratio)
    late = f"; {trial.left_out}" if trial.left_out else ""
    return f", {best.options[trial.option]} is {_describe(best)}{late}"


def _as_json(model: str, work: str, found: Proposal) -> dict[str, Any]:
    compared = [each for _, several in found.trials for each in several]
    return {
        "model": model,
        "work": work,
        "options": found.options,
        "compared": [
            each._asdict() | {"ratio": round(each.ratio, 4), "is_faster": each.is_faster} for each in compared
        ],
        "together": None if found.together is None else found.together._asdict(),
        "not_tried": {trial.option: trial.left_out for trial, _ in found.trials if trial.left_out},
        "machine": machine.describe(),
        "versions": machine.versions(("torch", "transformers")),
    }


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        known = {name: each for name, each in value.items() if each is not None}
        return "{ " + ", ".join(f"{name} = {_toml_value(each)}" for name, each in known.items()) + " }"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _trials(lengths: Sequence[int], num_samples: int, config: EngineConfig) -> list[Trial]:
    """Values worth comparing for a work: those at which its steps would be other steps."""
    cores, default = machine.usable_cpus(), torch.get_num_threads()
    threads = sorted({1, max(cores // 2, 1), max(cores - 1, 1), cores} - {default})
    num_tokens, num_sequences = sum(lengths), len(lengths) * num_samples
    budgets = [each for each in _BUDGETS if min(each, num_tokens) != min(config.max_num_batched_tokens, num_tokens)]
    sequences = [each for each in _SEQUENCES if min(each, num_sequences) != min(config.max_num_seqs, num_sequences)]
    all_fit = "a step of the default holds all of this work's"
    return [
        Trial("num_threads", threads, default, "" if threads else "one CPU is usable"),
        Trial("max_num_batched_tokens", budgets, config.max_num_batched_tokens, "" if budgets else f"{all_fit} tokens"),
        Trial("max_num_seqs", sequences, config.max_num_seqs, "" if sequences else f"{all_fit} sequences"),
        Trial("speculation", ["auto"], "off"),
    ]


def _prompts(arguments: argparse.Namespace, config: EngineConfig) -> tuple[list[Any], list[int]]:
    """The prompts as `LLM.generate` takes them, and the tokens of each (of texts, a third of their bytes)."""
    if arguments.prompt or arguments.file:
        found = [given.prompt for given in read_prompts(arguments)]
        return found, [len(each) if isinstance(each, list) else max(len(json.dumps(each)) // 3, 1) for each in found]
    found = next(random_prompts(config.model, arguments.prompts, arguments.prompt_tokens))
    return found, [arguments.prompt_tokens] * arguments.prompts


@contextmanager
def _engine(
    model: str, given: Options, prompts: list[Any], params: SamplingParams, bar: Any, options: Options
) -> Iterator[Round]:
    """Start an engine; a round generates all samples of all prompts, with a seed of its own."""
    before = torch.get_num_threads()
    texts = any(not isinstance(prompt, list) for prompt in prompts)
    try:
        with LLM(model, skip_tokenizer_init=not texts, **(dict(given) | dict(options))) as llm:
            threads = torch.get_num_threads()

            def one_round(i: int) -> float:
                torch.set_num_threads(threads)  # of the process: the other engine has set its own
                llm.reset_prefix_cache()  # a training's updates leave no prefix either
                start = time.perf_counter()
                outputs = llm.generate(prompts, params.clone(seed=i), use_tqdm=False)
                seconds = time.perf_counter() - start
                bar.update()
                return sum(len(sample.token_ids) for output in outputs for sample in output.outputs) / seconds

            torch.set_num_threads(before)
            yield one_round
    finally:
        torch.set_num_threads(before)
