"""The report of an evaluation in a headless Chromium, opened from disk with the network off. `make test-browser`."""

import pytest

from rollout_engine.rollouts.evaluation.report import EvalReport
from tests.browser.looking import LOWEST_CONTRAST, By, Keys, count, texts, wait_for
from tests.unit.looking.lines import HOSTILE
from tests.unit.rollouts.evaluation.lines import PLAN, evaluated


@pytest.fixture
def open_report(browser, tmp_path):
    """Write a report and open it; when the test ends the console must be empty."""

    def open_(samples, plan=PLAN, width=1200):
        EvalReport(plan, samples).to_html(tmp_path / "report.html")
        browser.set_window_size(width, 900)
        browser.get((tmp_path / "report.html").as_uri())
        return browser

    yield open_
    assert browser.get_log("browser") == []


def choose(browser, name, value):
    for option in browser.find_elements(By.CSS_SELECTOR, f"#{name} option"):
        if option.get_attribute("value") == value:
            option.click()


def test_ten_thousand_rollouts_load_and_scroll(open_report):
    browser = open_report(evaluated(209, num_tokens=140))
    assert count(browser).startswith("10032 of 10032 samples")
    script = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
    milliseconds = browser.execute_script(script)
    print(f"10,032 rollouts and their report: loaded in {milliseconds:.0f} ms")  # docs/evaluation.md has the figure
    assert 0 < milliseconds < 60_000
    browser.find_element(By.ID, "list").send_keys(Keys.END)
    wait_for(lambda: texts(browser, "#detail h2") == ["steps/300, sum, hot: group 208, sample 3"])
    assert len(texts(browser, ".row")) < 100


def test_curves_have_a_point_and_an_interval_for_each_cell(open_report):
    browser = open_report(evaluated(6))
    assert texts(browser, "#charts figcaption") == ["spell", "sum"]
    points = browser.execute_script("return [...document.querySelectorAll('circle title')].map(e => e.textContent)")
    assert len(points) == 12 and points[0].startswith("steps/100, spell, cool: 0.") and "[" in points[0]
    choose(browser, "metric", "pass@4")
    wait_for(lambda: "pass@4" in texts(browser, "#tables th"))
    assert "pass@4 of spell" in browser.find_element(By.TAG_NAME, "svg").get_attribute("aria-label")


def test_rollouts_are_filtered_by_checkpoint_task_setting_and_correctness(open_report):
    samples = evaluated(6)
    browser = open_report(samples)
    for name, value in {"checkpoint": "steps/200", "task": "sum", "setting": "hot", "correct": "true"}.items():
        choose(browser, name, value)
    many = sum(
        s["evaluation"] | {"checkpoint": "steps/200", "task": "sum", "setting": "hot", "correct": True}
        == s["evaluation"]
        for s in samples
    )
    assert many
    wait_for(lambda: count(browser).startswith(f"{many} of {len(samples)} samples, mean reward 1,"))


def test_tables_are_sorted_by_their_headings(open_report):
    browser = open_report(evaluated(6))
    [heading] = [each for each in browser.find_elements(By.CSS_SELECTOR, "#tables th button") if each.text == "mean"]
    values = lambda: [float(t.split()[0]) for t in texts(browser, "#tables details:first-child td:nth-child(4)")]  # noqa: E731
    heading.click()
    assert values() == sorted(values()) and len(values()) == 12
    heading.send_keys(Keys.ENTER)
    assert values() == sorted(values(), reverse=True)


def test_the_keyboard_reaches_metric_tables_and_rollouts(open_report):
    browser = open_report(evaluated(2))
    reached = set()
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(browser.switch_to.active_element.get_attribute("id") or browser.switch_to.active_element.text)
        if "list" in reached:
            break
    assert {"metric", "checkpoint", "task", "setting", "correct", "mean", "p", "list"} <= reached
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    assert texts(browser, "#detail h2") == ["steps/100, spell, cool: group 0, sample 0"]


def test_hostile_names_are_shown_and_never_run(open_report):
    samples = evaluated(1)
    for sample in samples:
        sample |= {
            "response": HOSTILE,
            "prompt": HOSTILE,
            "evaluation": sample["evaluation"] | {"task": HOSTILE, "answer": HOSTILE},
        }
    browser = open_report(samples, PLAN | {"tasks": {HOSTILE: {}}})
    browser.find_element(By.CSS_SELECTOR, ".row").click()
    assert not browser.find_elements(By.TAG_NAME, "img")
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    assert "<img src=x onerror=alert(1)>" in texts(browser, "figcaption")[0]
    assert "\x1b" not in browser.find_element(By.TAG_NAME, "body").text


def test_a_narrow_screen_needs_no_scrolling_sideways(open_report):
    browser = open_report(evaluated(4), width=500)
    narrow = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        browser.find_element(By.CSS_SELECTOR, ".row").click()
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_contrast_of_text_is_at_least_aa(open_report):
    browser = open_report(evaluated(2))
    browser.find_element(By.CSS_SELECTOR, ".row").click()
    assert browser.execute_script(LOWEST_CONTRAST) >= 4.5
