"""A rollout in a notebook: its samples, as text alone, and never more than fits."""

import math
import re
from html.parser import HTMLParser

import pytest
import torch
from tensordict import TensorDict

from rollout_engine import RequestError, show
from tests.unit.looking.lines import HOSTILE

ALLOWED = set("div pre table thead tbody tr th td details summary span p".split())


class Tags(HTMLParser):
    """Collects the tags, the names of attributes and the text of a piece of HTML."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def parsed(html):
    tags = Tags()
    tags.feed(html)
    return tags


class Letters:
    """A tokenizer whose token n is written <n>."""

    def decode(self, ids, **_):
        return "".join(f"<{token}>" for token in ids)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_shows_its_samples_with_rewards_and_texts(make_batch, layout):
    batch = make_batch(layout=layout)
    shown = parsed(batch._repr_html_())
    assert shown.tags <= ALLOWED and shown.attributes <= {"style", "title"}
    assert "RolloutBatch, " + layout in shown.text
    for row, (group, index) in enumerate(zip(batch["group_id"], batch["sample_index"], strict=True)):
        assert f"{group}·{index}" in shown.text and f"{batch['next', 'reward'][row, 0]:.4g}" in shown.text
        assert batch["text", "response"][row].strip() in shown.text and batch["text", "prompt"][row] in shown.text
    assert repr(show(batch)) == repr(batch) and show(batch)._repr_html_() == batch._repr_html_()


def test_a_plain_tensordict_is_shown_too_and_with_a_tokenizer_tokens_are_texts(make_batch):
    batch = make_batch()
    plain = TensorDict(dict(batch.items()), batch_size=batch.batch_size)
    html = show(plain, Letters())._repr_html_()
    for token in batch["tokens", "response"][batch["masks", "response"]].tolist():
        assert f">&lt;{token}&gt;</span>" in html
    assert "&ensp;" in show(plain)._repr_html_()


def test_each_token_tells_its_log_prob_and_version(make_batch):
    batch = make_batch()
    titles = re.findall(r"title='token (\d+), log-prob (\S+), version (\d+)'", batch._repr_html_())
    mask = batch["masks", "response"]
    assert [int(token) for token, _, _ in titles] == batch["tokens", "response"][mask].tolist()
    assert [float(value) for _, value, _ in titles] == [
        float(f"{value:.4g}") for value in batch["log_probs", "response"][mask].tolist()
    ]


def test_hostile_text_is_text(make_batch):
    batch = make_batch()
    batch["text", "response"] = [HOSTILE] * len(batch["seed"])
    batch["text", "prompt"] = [HOSTILE] * len(batch["seed"])
    html = batch._repr_html_()
    shown = parsed(html)
    assert shown.tags <= ALLOWED and "<script>alert(1)</script>" in shown.text
    assert "\x1b" not in html and "\u202e" not in html and "\N{SYMBOL FOR ESCAPE}[31m" in html


def test_long_texts_and_large_batches_are_cut(make_batch):
    batch = make_batch(num_groups=60, num_samples=2)
    batch["text", "response"] = ["x" * 1_000_000] * 120
    html = batch._repr_html_()
    assert len(html) < 500_000 and "996000 more characters" in html and "and 88 more samples" in html


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch[0],
        lambda batch: batch.reshape(len(batch), 1),
        lambda batch: batch.exclude(("text", "response")),
        lambda batch: batch.to("meta"),
        lambda batch: batch[:0],
    ],
    ids=["row", "reshaped", "without a key", "meta", "empty"],
)
def test_what_is_no_list_of_samples_any_more_shows_its_repr(make_batch, change):
    changed = change(make_batch())
    assert parsed(changed._repr_html_()).text.splitlines()[0] in repr(changed)


def test_rewards_that_are_not_finite_are_shown(make_batch):
    batch = make_batch(num_groups=1, num_samples=3)
    batch["next", "reward"] = torch.tensor([[math.inf], [-math.inf], [math.nan]])
    shown = show(batch)._repr_html_()
    assert all(f">{reward}</td>" in shown for reward in ("inf", "-inf", "nan"))


def test_what_is_no_rollout_is_refused():
    with pytest.raises(RequestError, match="a TensorDict as RolloutPolicy.rollout returns it"):
        show([1])
    with pytest.raises(RequestError, match=r"batch.keys\(\)"):
        show(TensorDict({"a": torch.zeros(2)}, batch_size=[2]))
