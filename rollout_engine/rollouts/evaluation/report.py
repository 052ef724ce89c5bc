"""Results of an evaluation: estimates with intervals, differences with p-values, and every sample."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import TokenTexts
from rollout_engine.looking.samples import TokenText
from rollout_engine.rollouts.evaluation.intervals import mean_interval, paired_difference
from rollout_engine.rollouts.evaluation.ledger import Cell, has_failed, num_sampled, read_ledger
from rollout_engine.rollouts.evaluation.page import write_report
from rollout_engine.rollouts.evaluation.parquet import write_parquet
from rollout_engine.rollouts.evaluation.votes import majority_at_k, pass_at_k

Row: TypeAlias = dict[str, Any]
_Prompts: TypeAlias = dict[int, list[dict[str, Any]]]
"""Number of a prompt -> its samples."""


class EvalReport:
    """Results of `RolloutPolicy.evaluate`, for all checkpoints of its directory."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        samples: Iterable[dict[str, Any]],
        token_text: TokenText = lambda token_id: None,
    ) -> None:
        """`plan` and `samples`: see `rollout_engine.rollouts.evaluation.ledger`; `token_text`: the text of a token."""
        self.plan, self._token_text = plan, token_text
        self.samples = _order_samples(plan, samples)
        """One dict per sample, as `read_jsonl` returns it, by checkpoint, task, setting, prompt and index."""
        by_prompt = _by_prompt(self.samples)
        self._values = {cell: _values(prompts, plan["k"]) for cell, prompts in by_prompt.items()}
        self.table: list[Row] = [row for cell, prompts in by_prompt.items() for row in self._estimates(cell, prompts)]
        """A dict for each checkpoint, task, setting and metric: its mean over prompts ("value"), the ends of its 95 %
        interval ("low", "high"; None with one prompt), "num_prompts", "num_samples", and the policy "versions" that
        sampled. Metrics: "mean" (of rewards), "pass@k", "maj@k", "length" (tokens), "truncated" (share), and of
        environments "failed" (share of episodes that failed, which the other metrics leave out)."""
        self.differences: list[Row] = list(self._differences())
        """A dict for each task, setting and metric, and each checkpoint against the first and the previous one: "value"
        ("checkpoint" minus "baseline", over the prompts of both), "low", "high", "p_value", "num_prompts"."""

    @classmethod
    def read(cls, out: str | os.PathLike[str], tokenizer: Any = None) -> Self:
        """The report of a directory that `evaluate(out=...)` wrote. Raises `RequestError` if it is none.

        `tokenizer`: a Hugging Face one, for the texts of tokens in `to_html`; without it they are numbers.
        """
        return cls(*read_ledger(out), TokenTexts(tokenizer).__getitem__)

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints that have samples, in the order in which they were given."""
        return list(dict.fromkeys(cell.checkpoint for cell in self._values))

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write the rows of `table`, then those of `differences` (which have a "baseline"), one JSON object a line."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in (*self.table, *self.differences)]
        _write_file(path, lambda: Path(path).write_text("".join(lines), encoding="utf-8"))

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all samples, one a row; "table" and "differences" of the metadata hold those as JSON.

        Raises `ConfigError` if the package `pyarrow` is not installed.
        """
        _write_file(
            path, lambda: write_parquet(path, self.samples, {"table": self.table, "differences": self.differences})
        )

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with curves, tables and all samples, to filter and open. It needs no network."""
        _write_file(path, lambda: write_report(self, path, self._token_text))

    def __str__(self) -> str:
        """The estimates as text, a line for each checkpoint, task and setting; then the differences, likewise."""
        text = _as_text(self.table, Cell._fields, "")
        if not self.differences:
            return text
        return f"{text}\n\n{_as_text(self.differences, ('checkpoint', 'baseline', *Cell._fields[1:]), '+')}"

    def _estimates(self, cell: Cell, prompts: _Prompts) -> Iterable[Row]:
        samples = [sample for group in prompts.values() for sample in group]
        versions = sorted(set().union(*(sample["policy_version"] for sample in samples)) - {-1})
        for metric, values in self._values[cell].items():
            estimate = mean_interval(np.array(list(values.values())))
            num_samples = sum(metric == "failed" or not has_failed(sample) for sample in samples)
            counts = {"num_prompts": len(values), "num_samples": num_samples, "versions": versions}
            yield {**cell._asdict(), "metric": metric, **estimate._asdict(), **counts}

    def _differences(self) -> Iterable[Row]:
        names = self.checkpoints
        pairs = dict.fromkeys((base, name) for i, name in enumerate(names) for base in (names[0], names[max(0, i - 1)]))
        for baseline, name in pairs:
            for cell in self._values:
                other = cell._replace(checkpoint=baseline)
                if cell.checkpoint != name or baseline == name or other not in self._values:
                    continue
                for metric, values in self._values[cell].items():
                    before = self._values[other].get(metric, {})
                    if both := [prompt for prompt in values if prompt in before]:
                        found = paired_difference(*(np.array([each[i] for i in both]) for each in (before, values)))
                        row = {**cell._asdict(), "baseline": baseline, "metric": metric, **found._asdict()}
                        yield row | {"num_prompts": len(both)}


def _order_samples(plan: Mapping[str, Any], samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    places = [{name: i for i, name in enumerate(plan[kind])} for kind in ("checkpoints", "tasks", "settings")]

    def key(sample: dict[str, Any]) -> tuple[int, ...]:
        cell = (place.get(name, 0) for place, name in zip(places, Cell.of(sample), strict=True))
        return (*cell, sample["group_id"], sample["sample_index"])

    return sorted(samples, key=key)


def _by_prompt(samples: Iterable[dict[str, Any]]) -> dict[Cell, _Prompts]:
    found: dict[Cell, _Prompts] = {}
    for sample in samples:
        found.setdefault(Cell.of(sample), {}).setdefault(sample["group_id"], []).append(sample)
    return found


def _values(prompts: _Prompts, ks: Sequence[int]) -> dict[str, dict[int, float]]:
    """Metric -> prompt -> its value. Prompts with fewer than k samples that did not fail have no pass@k."""
    found: dict[str, dict[int, float]] = {"mean": {}}
    found |= {f"{name}@{k}": {} for name in ("pass", "maj") for k in ks} | {"length": {}, "truncated": {}, "failed": {}}
    for prompt, group in prompts.items():
        if "error" in group[0]:
            found["failed"][prompt] = _mean(map(has_failed, group))
        samples = [sample for sample in group if not has_failed(sample)]
        if not samples:
            continue
        correct = [sample["evaluation"]["correct"] for sample in samples]
        answers = [sample["evaluation"]["answer"] for sample in samples]
        found["mean"][prompt] = _mean(sample["reward"] for sample in samples)
        found["length"][prompt] = _mean(map(num_sampled, samples))
        found["truncated"][prompt] = _mean(sample["truncated"] for sample in samples)
        for k in ks:
            if k <= len(samples):
                found[f"pass@{k}"][prompt] = pass_at_k(len(samples), sum(correct), k)
                found[f"maj@{k}"][prompt] = majority_at_k(answers, correct, k)
    return {metric: values for metric, values in found.items() if values}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _as_text(rows: Iterable[Row], names: Sequence[str], sign: str) -> str:
    """A table with a line for each combination of the fields `names`, and a column for each metric."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        interval = "" if row["low"] is None else f" [{row['low']:{sign}.4g}, {row['high']:{sign}.4g}]"
        found.setdefault(tuple(row[name] for name in names), {})[row["metric"]] = f"{row['value']:{sign}.4g}{interval}"
    metrics = list(dict.fromkeys(metric for told in found.values() for metric in told))
    lines = [[*names, *metrics]]
    lines += [[*key, *(told.get(metric, "") for metric in metrics)] for key, told in found.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _write_file(path: str | os.PathLike[str], write: Any) -> None:
    try:
        write()
    except OSError as problem:
        raise RequestError.for_field("path", str(path), "a file that can be written", f"{problem}.") from problem
