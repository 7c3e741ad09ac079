"""Chromium with the chat page in it, and what a test wants to know of it."""

import json
import shutil
import time
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = f"chromium: {CHROMIUM or 'missing'}, chromedriver: {DRIVER or 'missing'}"

_FLAGS = """--headless=new --no-sandbox --disable-gpu --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-dev-shm-usage"""

_NAMES = """
Promise.all(['state', 'dom', 'answers', 'talk', 'store', 'markdown'].map(
  (name) => import(`/page/${name}.js`))).then(([held, dom, answers, talk, store, markdown]) => {
  Object.assign(window, {$: dom.$, state: held.state, answers, talk, store, markdown});
  Object.assign(window, {input: dom.$('input'), log: dom.$('log')});
  const now = {turns: () => state.chat ? held.turns() : [], view: () => state.views.at(-1),
    running: () => state.chat && held.running(), model: () => state.model};
  for (const [name, get] of Object.entries(now))
    Object.defineProperty(window, name, {get, configurable: true});
  done();
})
"""


class Browser:
    """A Chromium of its own.

    Attributes:
        driver: Selenium's.
        url: of the server whose page is open.
    """

    def __init__(self) -> None:
        options = Options()
        options.binary_location = CHROMIUM or ""
        for flag in _FLAGS.split():
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(DRIVER))
        self.driver.set_script_timeout(20)
        self.url = ""

    def open(self, url: str, size: tuple[int, int] = (1200, 800), scheme: str = "light") -> None:
        """Open the page in a tab of a browser that remembers nothing."""
        self.driver.get(f"{url}/health")  # of the same origin, and without scripts
        self.js("localStorage.clear(); sessionStorage.clear()")
        self.run(
            "const gone = indexedDB.deleteDatabase('clocher'); gone.onsuccess = gone.onerror = done"
        )
        self.size(*size)
        self.prefer(scheme)
        self.console()
        self.requested()
        self.url = url
        self.driver.get(f"{url}/")
        self.ready()

    def ready(self) -> None:
        """Wait until the page knows its model; give scripts of tests the parts of its modules."""
        self.run(_NAMES)
        self.wait("state.chat && $('model').textContent")

    def reload(self) -> None:
        """Load the page again, once what it keeps is on disk."""
        self.run("store.chats().then(() => done())")  # reads wait for the writes before them
        self.driver.refresh()
        self.ready()

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Have a window of so many CSS pixels."""
        shape = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    def prefer(self, scheme: str) -> None:
        """Prefer a colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, code: str, *given: Any) -> Any:
        """Run a function's body in the page; return what it returns."""
        return self.driver.execute_script(code, *given)

    def run(self, code: str, *given: Any) -> Any:
        """Run a function's body in the page until it calls `done`; return what that is given."""
        return self.driver.execute_async_script(
            f"const done = [...arguments].at(-1); {code}", *given
        )

    def wait(self, condition: str, seconds: float = 20) -> Any:
        """Wait until an expression holds in the page; return its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(f"return {condition}")):
            assert time.monotonic() < end, f"{condition}; the page says: {self.text()[-500:]}"
            time.sleep(0.03)
        return value

    def write(self, text: str) -> None:
        """Put a text into the composer."""
        self.js("input.value = arguments[0]; input.dispatchEvent(new Event('input'))", text)

    def set(self, **values: object) -> None:
        """Change settings of the open chat."""
        for name, value in values.items():
            self.js(
                "const field = $(arguments[0]); field.value = arguments[1];"
                "for (const kind of ['input', 'change']) "
                "field.dispatchEvent(new Event(kind, {bubbles: true}))",
                name,
                str(value),
            )

    def text(self, selector: str = "body") -> str:
        """Return the text of an element as a reader sees it."""
        return self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def keys(self, *keys: str) -> None:
        """Press keys, one after the other."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def chord(self, modifier: str, key: str) -> None:
        """Press a key while a modifier is held."""
        ActionChains(self.driver).key_down(modifier).send_keys(key).key_up(modifier).perform()

    def click(self, selector: str) -> None:
        """Click the last of the elements."""
        self.driver.find_elements("css selector", selector)[-1].click()

    def send(self, text: str) -> None:
        """Write a message and send it."""
        self.js("document.getElementById('input').focus()")
        self.keys(text, Keys.ENTER)
        self.wait("running || turns.at(-1)?.role === 'assistant'")

    def ask(self, text: str, seconds: float = 30) -> str:
        """Send a message; return the text of the answer."""
        self.send(text)
        self.wait("!running", seconds)
        return str(self.js("return turns.at(-1).content"))

    def console(self) -> list[str]:
        """Return what the console got since the last call: also violations of the policy.

        Chromium asks for an icon of /health, which has none, at any later moment.
        """
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if "/favicon.ico" not in message]

    def requested(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def kept_to_itself(self, *told: str) -> None:
        """Check that nothing was asked of others, and nothing said to the console.

        Args:
            told: parts of what Chromium itself says there, of each answer that is an error.
        """
        addresses = [url for url in self.requested() if not url.startswith("data:")]
        assert addresses and all(url.startswith(f"{self.url}/") for url in addresses), addresses
        messages = self.console()
        assert all(any(part in each for part in told) for each in messages), messages
