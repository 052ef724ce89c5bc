"""The page of rollouts in a headless Chromium, opened from disk with the network off. `make test-browser` runs it."""

import pytest

from rollout_engine.looking.page import write_page
from tests.browser.looking import LOWEST_CONTRAST, By, Keys, count, texts, wait_for
from tests.unit.looking.lines import HOSTILE, rollouts


@pytest.fixture
def open_page(browser, tmp_path):
    """Write samples into a page and open it; when the test ends the console must be empty."""

    def open_(samples, width=1200, **options):
        path = tmp_path / "page.html"
        write_page(samples, path, **({"title": "test", "token_text": lambda token_id: f"w{token_id} "} | options))
        browser.set_window_size(width, 900)
        browser.get(path.as_uri())
        return browser

    yield open_
    assert browser.get_log("browser") == []


def fill(browser, name, value):
    field = browser.find_element(By.ID, name)
    field.clear()
    field.send_keys(value)


def test_ten_thousand_rollouts_load_and_scroll(open_page):
    browser = open_page(rollouts(1250, 8, num_tokens=140))
    assert count(browser).startswith("10000 of 10000 samples")
    milliseconds = browser.execute_script(
        "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
    )
    print(f"10,000 rollouts: loaded in {milliseconds:.0f} ms")  # shown by -s; docs/rollout_files.md has the figure
    assert 0 < milliseconds < 60_000
    rows = len(texts(browser, ".row"))
    assert 10 < rows < 100  # only what is seen is in the page
    browser.find_element(By.ID, "list").send_keys(Keys.END)
    wait_for(lambda: texts(browser, "#detail h2") == ["group 1249, sample 7"])
    assert len(texts(browser, ".row")) < 100


def test_filters_and_sorting(open_page):
    samples = rollouts(6, 4)
    browser = open_page(samples)
    fill(browser, "search", "question 3")
    wait_for(lambda: count(browser).startswith("4 of 24"))
    fill(browser, "low", "0.5")
    many = sum(s["reward"] >= 0.5 for s in samples if s["group_id"] == 3)
    wait_for(lambda: count(browser).startswith(f"{many} of 24"))
    for name in ("search", "low"):
        browser.find_element(By.ID, name).send_keys(Keys.END, *[Keys.BACKSPACE] * 12)
    wait_for(lambda: count(browser).startswith("24 of 24"))
    browser.find_element(By.CSS_SELECTOR, "#sort option[value=reward]").click()
    best = max(samples, key=lambda s: s["reward"])
    wait_for(lambda: texts(browser, ".row b")[0] == f"{best['group_id']} · {best['sample_index']}")
    browser.find_element(By.CSS_SELECTOR, "#version option[value='2']").click()
    wait_for(lambda: count(browser).startswith("8 of 24"))


def test_a_row_of_the_list_shows_all_of_its_two_lines(open_page):
    [sample] = rollouts(1, 1)
    evaluation = {
        "checkpoint": "runs/steps/100",
        "task": "spell_backward",
        "setting": "plain temperature=0.7, top_k=50",
    }
    browser = open_page([sample, sample | {"evaluation": evaluation | {"correct": True, "answer": None}}])
    cut = "return [...document.querySelectorAll('.row')].map(row => row.scrollHeight > row.clientHeight)"
    assert browser.execute_script(cut) == [False, False]


def test_the_keyboard_alone_suffices(open_page):
    samples = rollouts(2, 3)
    browser = open_page(samples)
    body = browser.find_element(By.TAG_NAME, "body")
    for _ in range(9):  # through the filters to the list
        body.send_keys(Keys.TAB)
        body = browser.switch_to.active_element
    assert body.get_attribute("id") == "list"
    body.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    assert texts(browser, "#detail h2") == ["group 0, sample 1"]
    detail = browser.switch_to.active_element
    detail.send_keys(Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert len(texts(browser, ".side section")) == 3
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.switch_to.active_element.get_attribute("id") == "list"


def test_two_samples_are_compared(open_page):
    samples = rollouts(1, 2)
    samples[0] |= {"response_token_ids": [1, 2, 3], "log_probs": [-1.0] * 3, "policy_version": [0] * 3}
    samples[1] |= {"response_token_ids": [1, 9, 3], "log_probs": [-1.0] * 3, "policy_version": [0] * 3}
    browser = open_page(samples)
    rows = browser.find_elements(By.CSS_SELECTOR, ".row")
    rows[0].click()
    browser.find_elements(By.CSS_SELECTOR, ".actions button")[1].click()
    browser.find_elements(By.CSS_SELECTOR, ".row")[1].click()
    browser.find_elements(By.CSS_SELECTOR, ".actions button")[1].click()
    shown = [[text.strip() for text in texts(browser, kind)] for kind in (".gone", ".new", ".same")]
    assert shown == [["w2"], ["w9"], ["w1", "w3"]]


def test_hostile_text_is_shown_and_never_run(open_page):
    samples = [s | {"prompt": HOSTILE, "response": HOSTILE, "columns": {HOSTILE: HOSTILE}} for s in rollouts(1, 2)]
    browser = open_page(samples, title=HOSTILE, token_text=lambda token_id: HOSTILE)
    browser.find_element(By.CSS_SELECTOR, ".row").click()
    assert not browser.find_elements(By.TAG_NAME, "img")
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    assert "<img src=x onerror=alert(1)>" in browser.find_element(By.CSS_SELECTOR, "#detail pre").text
    assert "\x1b" not in browser.find_element(By.TAG_NAME, "body").text


def test_a_megabyte_of_text_is_cut_until_it_is_asked_for(open_page):
    [sample] = rollouts(1, 1)
    browser = open_page([sample | {"prompt": "x" * 1_000_000}])
    browser.find_element(By.CSS_SELECTOR, ".row").click()
    browser.find_element(By.CSS_SELECTOR, "#detail summary").click()
    wait_for(lambda: len(browser.find_element(By.CSS_SELECTOR, "#detail pre").get_property("textContent")) < 101_000)
    browser.find_element(By.CSS_SELECTOR, "#detail pre button").click()
    wait_for(lambda: len(browser.find_element(By.CSS_SELECTOR, "#detail pre").get_property("textContent")) == 1_000_000)


def test_a_narrow_screen_needs_no_scrolling_sideways(open_page):
    browser = open_page(rollouts(4, 4), width=500)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        browser.find_element(By.CSS_SELECTOR, ".row").click()
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_contrast_of_text_is_at_least_aa(open_page):
    """WCAG 2.1, 1.4.3: 4.5 to 1 between text and background, in every colouring."""
    sample = rollouts(1, 1)[0]
    count = len(sample["response_token_ids"])
    turns = {"turns": list(range(count)), "policy_version": list(range(count)), "log_probs": [-20.0] * count}
    samples = [sample | turns | {"reward": reward, "sample_index": i} for i, reward in enumerate((0.0, 1.0))]
    browser = open_page(samples)
    for colour in ("logprob", "advantage", "version", "turn", "none"):
        browser.find_element(By.CSS_SELECTOR, f"#colour option[value={colour}]").click()
        for index in range(2):
            browser.find_elements(By.CSS_SELECTOR, ".row")[index].click()
            assert browser.execute_script(LOWEST_CONTRAST) >= 4.5, colour
