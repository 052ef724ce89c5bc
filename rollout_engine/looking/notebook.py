"""Rollouts as a piece of HTML for notebooks: a table of samples that open, without a script or a style of its own.

All texts of a rollout are shown as text: it is escaped, control characters are pictures, and long texts are cut.
"""

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rollout_engine.batches.picture_files import named_pictures, png_files
from rollout_engine.looking.samples import Viewed, advantages, visible

_MOST_SAMPLES = 32
_MOST_TOKENS = 1_000
"""Tokens of a sample that are drawn."""
_MOST_CHARS = 4_000
"""Characters of a text that are shown."""
_MOST_PICTURE_BYTES = 1 << 23
_HEAD = ("sample", "reward", "advantage", "tokens", "log-prob", "version", "ended by", "response")


def html_of(head: str, samples: Sequence[Viewed], num_all: int, *, has_texts: bool) -> str:
    """A piece of HTML of some samples.

    `head`: lines of text above. `num_all`: how many samples there are, of which `samples` are the first.
    `has_texts`: the texts of tokens are known; otherwise tokens are boxes next to the text of the response.
    """
    parts = [f"<div><pre style='margin:0 0 6px'>{_to_html(head)}</pre>"]
    parts.append("<table><thead><tr>" + "".join(f"<th>{name}</th>" for name in _HEAD) + "</tr></thead><tbody>")
    first = samples[:_MOST_SAMPLES]
    images = png_files((each.sample for each in first), most_bytes=_MOST_PICTURE_BYTES)
    for each, advantage in zip(first, advantages(samples), strict=False):
        parts += _row(each, advantage, has_texts, images)
    parts.append("</tbody></table>")
    if num_all > min(len(samples), _MOST_SAMPLES):
        parts.append(f"<p>and {num_all - min(len(samples), _MOST_SAMPLES)} more samples</p>")
    return "".join(parts) + "</div>"


def num_shown(num_all: int) -> int:
    """The number of samples that `html_of` shows of `num_samples`."""
    return min(num_all, _MOST_SAMPLES)


def _row(each: Viewed, advantage: float | None, has_texts: bool, images: Mapping[str, bytes]) -> Iterator[str]:
    sample = each.sample
    versions = sorted({*sample["policy_version"]} - {-1})
    cells = (
        f"{sample['group_id']}·{sample['sample_index']}",
        _number(each.reward),
        _number(advantage),
        str(len(each.pieces)),
        _number(each.mean_log_prob),
        ", ".join(map(str, versions[:8])),
        str(sample.get("ended_by") or sample.get("finish_reason") or ""),
    )
    yield "<tr>" + "".join(f"<td style='vertical-align:top'>{_to_html(cell, 200)}</td>" for cell in cells)
    start = _to_html(" ".join(each.response[:300].split()), 100)
    yield f"<td style='text-align:left;vertical-align:top'><details><summary>{start}</summary>"
    style = "white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0"
    yield from (_picture(images[name]) for name in named_pictures(sample) if name in images)
    yield f"<div style='{style};opacity:.7'>{_to_html(each.prompt)}</div><div style='{style}'>"
    if not has_texts:
        yield f"{_to_html(each.response)}</div><div style='line-height:1'>"
    yield from (_token(each, place, has_texts) for place in range(min(len(each.pieces), _MOST_TOKENS)))
    if len(each.pieces) > _MOST_TOKENS:
        yield f" and {len(each.pieces) - _MOST_TOKENS} more tokens"
    yield "</div></details></td></tr>"


def _picture(image: bytes) -> str:
    source = f"data:image/png;base64,{b64encode(image).decode()}"
    return f"<img src='{source}' style='min-width:5em;max-width:100%;max-height:16em;image-rendering:pixelated'>"


def _token(each: Viewed, place: int, has_texts: bool) -> str:
    """A token with a colour that is the stronger, the less likely it was, and its figures as a tooltip."""
    sample = each.sample
    logprob, version = sample["log_probs"][place], sample["policy_version"][place]
    told = f"token {sample['response_token_ids'][place]}"
    part = 0.0
    if version >= 0:
        told += f", log-prob {logprob:.4g}, version {version}"
        part = 1 - math.exp(min(logprob, 0.0))
    else:
        told += ", not sampled"
    text = _to_html(each.pieces[place], 200) if has_texts else "&ensp;"
    border = "" if has_texts else ";border:1px solid rgba(128,128,128,.4)"
    return f"<span title='{escape(told)}' style='background:rgba(200,60,30,{part:.2f}){border}'>{text}</span>"


def _to_html(text: str, most: int = _MOST_CHARS) -> str:
    """Text as HTML that shows it."""
    cut = "" if len(text) <= most else f" … {len(text) - most} more characters"
    return escape(visible(text[:most]) + cut)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
