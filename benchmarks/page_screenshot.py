"""The picture of the live page in docs/server.md: the demo's agents on SmolLM2 play a short episode.

    python benchmarks/page_screenshot.py docs/images/live-page.png

Needs chromium, chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from pathlib import Path

import openai
import uvicorn
from selenium import webdriver

import precache
from precache import Engine
from precache.server import ServerSettings, build_app

ADAPTERS = Path(precache.__file__).parent / "demo" / "adapters"
ROLES = ("plan", "action", "reflect")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-sync",
    "--hide-scrollbars",
)
QUESTION = (
    "Question: Which of these states is farthest north? Options: (A) West Virginia (B) Louisiana (C) Arizona "
    "(D) Oklahoma\nContext: Maps have four cardinal directions, or main directions: north, south, east and west. "
    "A compass rose is a set of arrows that point to them, and it usually shows only their first letters.\n"
)
OTHER_QUESTION = (
    "Question: Is a rock made by melting and cooling a solid or a liquid? Options: (A) a solid (B) a liquid\n"
    "Context: Solid, liquid and gas are states of matter. When matter is a solid, it has a shape of its own.\n"
)
CUES = {"plan": "Thought {}:", "action": "Action {}:", "reflect": "Reflection:"}
OBSERVATION = (
    "Observation {}: a page of 40 words says where each of them lies on a map of the world.\n"
)
ROUNDS = 3


def play(client: openai.OpenAI, history: str) -> str:
    """Run one episode and return its history."""
    for number in range(1, ROUNDS + 1):
        for role in ("plan", "action"):
            history = say(client, role, history + CUES[role].format(number))
        history += OBSERVATION.format(number)
    return say(client, "reflect", history + CUES["reflect"])


def say(client: openai.OpenAI, model: str, prompt: str) -> str:
    """Let an agent go on, and return what is then there."""
    said = client.completions.create(
        model=model, prompt=prompt, max_tokens=24, temperature=0, stop=["\n"]
    )
    return f"{prompt}{said.choices[0].text}\n"


def shoot(url: str, path: Path, width: int, height: int, dark: bool) -> None:
    """Take a picture of the page."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    profile = tempfile.mkdtemp()
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)
    time.sleep(2.5)
    driver.save_screenshot(str(path))
    driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--width", type=int, default=1180)
    parser.add_argument("--height", type=int, default=1180)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    engine = Engine.load(
        "smollm2",
        adapters={role: ADAPTERS / role for role in ROLES},
        policy="rebaseshared",
        schedule="idle-lazy-prefill",
        cache_memory="64MiB",
    )
    config = uvicorn.Config(
        build_app(engine, ServerSettings(base_name="smollm2")), port=0, log_config=None
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    play(client, QUESTION)
    say(client, "smollm2", play(client, OTHER_QUESTION) + "In short:")
    time.sleep(1)
    shoot(url, args.path, args.width, args.height, args.dark)
    server.should_exit = True


if __name__ == "__main__":
    main()
