"""Questions that tests of pages ask of a browser. Where selenium is not installed, who imports this is skipped."""

import time
from pathlib import Path

import pytest

By = pytest.importorskip("selenium.webdriver.common.by").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

LOWEST_CONTRAST = (Path(__file__).parent / "lowest_contrast.js").read_text()


def count(browser):
    return browser.find_element(By.ID, "count").text


def texts(browser, selector):
    """Texts of all elements at one moment: rows are made anew while the page filters and scrolls."""
    script = "return [...document.querySelectorAll(arguments[0])].map(element => element.innerText)"
    return browser.execute_script(script, selector)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
