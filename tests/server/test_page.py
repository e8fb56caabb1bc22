"""The live page in a real browser: it shows what the engine did, and nothing that it is told can run in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Serve, relaycaching
from tests.server.live import LiveServer

API_KEY = "an-api-key"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver (apt-get install chromium chromium-driver)",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--window-size=1180,1500",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


def wait(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 20).until(lambda it: it.execute_script(f"return {script}"))


SEGMENTS = "[...document.querySelectorAll('.session .band > i')].map(i => i.className)"


@needs_browser
def test_the_page_follows_the_engine(server: LiveServer, browser: Any) -> None:
    browser.get(server.url)
    wait(browser, "document.querySelector('#sessions .none')?.textContent.includes('Nothing')")
    history = "Question: which of these is the warmest?"
    history += server.complete("plan", history, max_tokens=8).choices[0].text
    wait(browser, f"{SEGMENTS}.join() === 'a0'")
    server.complete("action", history + " Observation: it is.", max_tokens=8)
    wait(browser, f"{SEGMENTS}.join() === 'a0,a1'")
    first_row = "document.querySelector('#turns tr').innerText"
    assert wait(browser, f"{first_row}.includes('hit') && {first_row}").startswith("action")
    assert wait(browser, "document.querySelectorAll('#turns tr .others').length > 0")
    assert wait(browser, "document.querySelectorAll('#parts li').length") == 4
    assert browser.get_log("browser") == []  # no script error, nothing the policy refused


@needs_browser
def test_what_runs_again_for_a_reader_is_shown_as_computed(
    serve: Serve, browser: Any, tmp_path: Path
) -> None:
    with serve(**relaycaching(tmp_path)) as server:
        server.complete("plan", "the same history", max_tokens=1)
        server.complete("action", "the same history", max_tokens=1)
        turn = server.http.get("/v1/live").json()["turns"][-1]
        assert turn["catch_up_tokens"] == turn["cached_tokens"] == 15
        browser.get(server.url)
        row = "[...document.querySelector('#turns tr').querySelectorAll('td.num')].map(i => i.innerText)"
        assert wait(browser, f"document.querySelector('#turns tr') && {row}")[:2] == ["0", "16"]
        parts = wait(browser, "document.querySelector('#parts').innerText")
        assert "hidden states" in parts
        assert "unused" not in parts


@needs_browser
def test_text_of_others_stays_text(serve: Serve, browser: Any) -> None:
    with serve() as server:
        for agent in ("plan", "action"):
            server.complete(agent, agent[0] + "<b>x</b>" + "the same history " * 6, max_tokens=1)
        browser.get(server.url)
        text = wait(browser, "document.querySelector('#hints li')?.textContent")
        assert "<b>x" in text
        assert browser.execute_script("return document.querySelectorAll('#hints b').length") == 0


@needs_browser
def test_the_page_asks_for_a_key(serve: Serve, browser: Any) -> None:
    from selenium.webdriver.common.by import By

    with serve({"api_keys": (API_KEY,)}) as server:
        browser.get(server.url)
        wait(browser, "!document.getElementById('sign-in').hidden")
        for key, shown in (("not the key", "sign-in"), (API_KEY, "main")):
            browser.find_element(By.ID, "key").send_keys(key)
            browser.find_element(By.CSS_SELECTOR, "#sign-in button").click()
            wait(browser, f"!document.getElementById('{shown}').hidden")
            expected = "This key is not valid." if shown == "sign-in" else ""
            wait(browser, f"document.getElementById('key-error').textContent === '{expected}'")


@needs_browser
def test_the_page_fits_a_phone(server: LiveServer, browser: Any) -> None:
    server.complete("plan", "a history")
    browser.get(server.url)
    browser.set_window_size(500, 900)  # the narrowest window that chromium makes
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 780, "deviceScaleFactor": 1, "mobile": True},
    )
    wait(browser, "document.querySelectorAll('#turns tr').length >= 1")
    assert wait(browser, "document.documentElement.scrollWidth") <= 360
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_loads_nothing_from_elsewhere(server: LiveServer) -> None:
    response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in response.text.replace("http-equiv", "")
    assert "innerHTML" not in response.text
