"""Write docs/plots/chat-page.png: the chat page after a conversation with the default model."""

import sys
from pathlib import Path

from browser import Browser
from serving import serving

PICTURE = Path(__file__).parents[1] / "docs" / "plots" / "chat-page.png"
QUESTIONS = ("Name the capital of France.", "Name three fruits and their colours.")
SETTINGS = {"temperature": "0.2", "seed": "1", "max_tokens": "200"}


def main() -> int:
    """Talk with the model and write the picture."""
    browser = Browser()
    try:
        with serving(env={"CLOCHER_EMBEDDED": "0"}) as server:
            browser.open(server.url)
            browser.size(960, 600, scale=1.5)
            for name, value in SETTINGS.items():
                browser.js("$(arguments[0]).value = arguments[1]", name, value)
            for turn, question in enumerate(QUESTIONS, 1):
                browser.js("input.value = arguments[0]; expect(); submit()", question)
                browser.wait(f"!running && turns.length === {2 * turn}")
            browser.js("log.scrollTop = log.scrollHeight; $('down').hidden = true; input.blur()")
            browser.driver.save_screenshot(str(PICTURE))
    finally:
        browser.driver.quit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
