"""The view in a terminal, driven by keys without one."""

import asyncio

import pytest
from rich.console import Console
from textual.widgets import DataTable, Input

from rollout_engine.looking.samples import viewed, visible
from rollout_engine.looking.terminal import RolloutViewer
from tests.unit.looking.lines import HOSTILE, rollouts


def drive(samples, *keys):
    """Press keys; returns the first cells of the table's rows, and what the right side shows as plain text."""
    app = RolloutViewer(viewed(samples, lambda token_id: f"t{token_id} "), "test")

    async def run():
        async with app.run_test(size=(120, 40)) as pilot:
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            table = app.query_one(DataTable)
            return [str(table.get_row_at(i)[0]) for i in range(table.row_count)], _plain(app.shown)

    return asyncio.run(run())


def _plain(content):
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def test_the_chosen_sample_is_shown_whole():
    samples = rollouts(2, 2)
    rows, shown = drive(samples, "down")
    assert rows == ["0·0", "0·1", "1·0", "1·1"]
    assert "group 0, sample 1" in shown and "question 0" in shown and f"seed: {2**64 - 1}" in shown
    for token_id in samples[1]["response_token_ids"]:
        assert f"t{token_id}" in shown


def test_samples_are_sorted_by_reward_then_length():
    samples = rollouts(3, 2)
    rows, shown = drive(samples, "s")
    best = max(samples, key=lambda s: s["reward"])
    assert rows[0] == f"{best['group_id']}·{best['sample_index']}"
    assert f"group {best['group_id']}, sample {best['sample_index']}" in shown
    rows, _ = drive(samples, "s", "s")
    longest = max(len(s["response_token_ids"]) for s in samples)
    first = next(s for s in samples if len(s["response_token_ids"]) == longest)
    assert rows[0] == f"{first['group_id']}·{first['sample_index']}"


def test_a_group_and_a_comparison():
    samples = rollouts(2, 3)
    _, shown = drive(samples, "down", "g")
    assert all(f"group 0, sample {i}" in shown for i in range(3)) and "group 1" not in shown
    _, shown = drive(samples, "down", "d")
    assert "group 0, sample 0 (red) and group 0, sample 1 (green)" in shown


def test_only_the_beginnings_of_long_responses_are_compared():
    first, second = rollouts(1, 2)
    for sample, last in ((first, 7), (second, 8)):
        many = [0, 1] * 10_000 + [last]
        sample |= {"response_token_ids": many, "log_probs": [0.0] * len(many), "policy_version": [0] * len(many)}
    _, shown = drive([first, second], "down", "d")
    assert "[only the first 2000 tokens are compared]" in " ".join(shown.split())
    assert shown.count("t0") == 1_000 and "t7" not in shown and "t8" not in shown


def test_what_others_said_is_folded():
    [sample] = rollouts(1, 1, num_tokens=30)
    length = len(sample["response_token_ids"])
    sample["policy_version"] = [-1] * length
    assert f"[{length} tokens of others" in drive([sample])[1]
    assert f"t{sample['response_token_ids'][0]}" in drive([sample], "f")[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("times", range(5))
def test_every_colour_draws(times):
    assert "group 0, sample 0" in drive(rollouts(1, 2), *("c" * times))[1]


def test_control_characters_are_pictures():
    assert "\x1b" not in visible(HOSTILE) and "\N{SYMBOL FOR ESCAPE}" in visible(HOSTILE)
    assert "\u202e" not in visible(HOSTILE)
    said = {"prompt": HOSTILE, "response": HOSTILE, "columns": {HOSTILE: HOSTILE}}
    samples = [s | said for s in rollouts(1, 1)]
    assert "\x1b[31m" not in drive(samples)[1]


def test_searching_leaves_what_contains_the_words():
    samples = rollouts(3, 2)
    app = RolloutViewer(viewed(samples, lambda token_id: None), "test")

    async def run():
        async with app.run_test() as pilot:
            await pilot.press("/")
            app.query_one(Input).value = "question 2"
            await pilot.press("enter")
            return app.query_one(DataTable).row_count

    assert asyncio.run(run()) == 2
