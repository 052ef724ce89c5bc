"""One HTML page of rollouts to look at: to filter, sort, open, colour by token, and compare. It needs no network."""

import json
import logging
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollout_engine.batches.json_values import json_value
from rollout_engine.batches.picture_files import damaged_pictures, hex_digest, png_files
from rollout_engine.looking.samples import TokenText, Viewed, advantages, viewed

logger = logging.getLogger("rollout_engine")

MOST_PICTURE_BYTES = 1 << 26
"""Bytes of the pictures that a page holds, the first ones; of others it shows the digest."""


def write_page(
    samples: Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str,
    token_text: TokenText = lambda token_id: None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Write samples, as `read_jsonl` returns them, into one page that holds all it needs.

    `token_text`: the text of a token inside a text; without one its id is shown. Whatever a text holds is shown as
    text: it is data of the page, never markup or a script. `report`: "checkpoints", "table" and "differences" of an
    evaluation, shown above its samples.
    """
    data = page_data(samples, title, token_text) | ({"report": report} if report else {})
    # Inside a script element only "</script" and "<!--" end or change it; JSON may write "<" in another way.
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _file("page.html").replace("__REPORT__", _file("report.js") if report else "")
    Path(path).write_text(page.replace("__DATA__", encoded), encoding="utf-8", errors="replace")


def _file(name: str) -> str:
    return files("rollout_engine.looking").joinpath(name).read_text(encoding="utf-8")


def page_data(samples: Iterable[Mapping[str, Any]], title: str, token_text: TokenText) -> dict[str, Any]:
    """Data that the page's script reads; prompts and texts of tokens are in it once."""
    prompts: dict[str, int] = {}
    vocabulary: dict[int, str] = {}
    made = []
    shown = viewed(samples, token_text)
    for each, advantage in zip(shown, advantages(shown), strict=True):
        vocabulary.update(zip(each.sample["response_token_ids"], each.pieces, strict=True))
        made.append(_sample(each, prompts.setdefault(each.prompt, len(prompts)), advantage))
    data = {"title": title, "prompts": list(prompts), "vocabulary": vocabulary, "samples": made}
    damaged = damaged_pictures(each.sample for each in shown)
    for problem in damaged.values():
        logger.warning("%s", problem)
    images = png_files((each.sample for each in shown), most_bytes=MOST_PICTURE_BYTES)
    urls = {
        name: f"data:image/png;base64,{b64encode(image).decode()}"
        for name, image in images.items()
        if name not in damaged
    }
    return data | ({"pictures": urls} if urls else {}) | ({"damaged": damaged} if damaged else {})


def _sample(each: Viewed, prompt: int, advantage: float | None) -> dict[str, Any]:
    sample = each.sample
    made = {
        "where": each.group,
        "group": sample["group_id"],
        "index": sample["sample_index"],
        "seed": str(sample["seed"]),  # a number of JavaScript has 53 bits
        "prompt": prompt,
        "response": each.response,
        "tokens": sample["response_token_ids"],
        "log_probs": [round(logprob, 4) for logprob in sample["log_probs"]],
        "versions": sample["policy_version"],
        "mean": each.mean_log_prob,
        "reward": each.reward,
        "advantage": advantage,
        "finish_reason": sample.get("finish_reason"),
    }
    rest = ("rewards", "columns", "turns", "ended_by", "error", "evaluation")
    made |= {name: sample[name] for name in rest if sample.get(name)}
    if sample.get("messages"):
        made["messages"] = json_value(sample["messages"])
    if sample.get("pictures"):
        made["pictures"] = [hex_digest(each["picture"]) for each in sample["pictures"]]
    return made
