"""Write docs/plots/chat-page.png: the chat page after a real run of the embedded model."""

import sys
from pathlib import Path

from browser import Browser
from serving import serving

PICTURE = Path(__file__).parents[1] / "docs" / "plots" / "chat-page.png"
TEXT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file."""
    with open('''
SETTINGS = {"temperature": "0.3", "seed": "1", "max_tokens": "50"}


def main() -> int:
    """Run the model and write the picture."""
    browser = Browser()
    try:
        with serving() as server:
            browser.open(server.url)
            browser.size(960, 600, scale=1.5)
            for name, value in SETTINGS.items():
                browser.js("$(arguments[0]).value = arguments[1]", name, value)
            browser.js("input.value = arguments[0]; expect(); submit()", TEXT)
            browser.wait("!running && turns.length === 2")
            browser.js("log.scrollTop = 0; $('down').hidden = true; input.blur()")
            browser.driver.save_screenshot(str(PICTURE))
    finally:
        browser.driver.quit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
