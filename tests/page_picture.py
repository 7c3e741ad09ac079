"""Write docs/plots/chat-page.png: the chat page after some chats with a model."""

import sys
from pathlib import Path

from browser import Browser
from serving import serving

PICTURE = Path(__file__).parents[1] / "docs" / "plots" / "chat-page.png"
CHATS = (
    ("Translate \u201cgood morning\u201d into French.",),
    ("What is a mutex? One sentence.",),
    ("Write a regular expression that finds dates like 2026-11-26.",),
    (
        "Write a Python function for the n-th Fibonacci number.",
        "List its time and memory in a small Markdown table.",
    ),
)


def main() -> int:
    """Talk with the model and write the picture."""
    browser = Browser()
    try:
        with serving(*sys.argv[1:2], env={"CLOCHER_EMBEDDED": "0"}) as server:
            browser.open(server.url)
            browser.size(1100, 760, scale=1.5)
            for questions in CHATS:
                browser.js("$('new').click()")
                browser.wait("!turns.length")
                browser.set(temperature=0, seed=1, max_tokens=200)
                for question in questions:
                    browser.write(question)
                    browser.js("$('send').click()")
                    browser.wait("running || turns.length")
                    browser.wait("!running", 120)
            browser.run("setTimeout(done, 300)")
            browser.js("log.scrollTop = 0; input.blur()")
            browser.run("setTimeout(done, 300)")
            browser.js("$('down').hidden = true")
            browser.driver.save_screenshot(str(PICTURE))
    finally:
        browser.driver.quit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
