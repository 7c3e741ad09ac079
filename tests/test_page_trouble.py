"""The chat page in a real Chromium when things go wrong, and models wish it ill."""

import os
import signal

import pytest
from browser import CHROMIUM, DRIVER, MISSING, Browser
from scripted import Script, scripted_server, words
from selenium.webdriver.common.keys import Keys
from serving import Served

from clocher_runtime.serve.errors import failure
from clocher_runtime.text.answers import Delta

pytest_plugins = ("page_fixtures",)
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


# What goes wrong.


def test_an_engine_that_dies_is_told_of_and_comes_back(browser: Browser, speaker: Served) -> None:
    browser.open(speaker.url)
    browser.set(temperature=0)  # the longest answer: until the context is full
    engine = speaker.health()["engine_pid"]
    browser.send("Write a loop.")
    browser.wait("turns[1]?.content.length + turns[1]?.reasoning.length > 20")
    os.kill(engine, signal.SIGKILL)
    browser.wait("!running")
    assert "The engine ended" in browser.text(".fault") and "started again" in browser.text(
        ".fault"
    )
    assert len(browser.js("return turns[1].content + turns[1].reasoning")) > 20
    browser.click(".again")
    browser.wait("turns.at(-1).fault?.[0].includes('being loaded')")
    while speaker.client.get("/health").status_code == 503:
        pass
    browser.set(max_tokens=5)
    browser.click(".again")
    browser.wait("!running && turns.at(-1).tokens === 5")
    browser.kept_to_itself("503 (Service Unavailable)")


def test_a_text_that_is_too_long_is_told_what_to_do(browser: Browser, speaker: Served) -> None:
    browser.open(speaker.url)
    browser.write("word " * 5000)
    browser.click("#send")
    browser.wait("turns.at(-1).fault")
    assert "maximum context length is 4096 tokens" in browser.text(".fault")
    assert "new chat" in browser.text(".fault")
    browser.kept_to_itself("400 (Bad Request)")


def test_a_busy_server_and_one_that_ends_are_told_of(browser: Browser, script: Script) -> None:
    script.refusal = failure("rate_limit_exceeded", waiting=8, retry_after=3)
    browser.ask("One?")
    assert "try again in 3 s" in browser.text(".fault") and browser.text(".again") == "Try again"
    script.refusal = failure("draining")
    browser.click(".again")
    browser.wait("turns.at(-1).fault?.[0].includes('shutting down')")
    script.refusal, script.steps = None, words("Yes.")
    browser.click(".again")
    browser.wait("!running && turns.length === 2 && turns[1].content === 'Yes.'")
    assert browser.text(".fault") == "" and len(script.asked[-1]["messages"]) == 1


def test_a_server_that_is_gone_is_told_of(browser: Browser) -> None:
    with scripted_server() as (url, engine):
        browser.open(url)
        engine.script.steps = words("Yes.")
        browser.ask("One?")
    browser.ask("Two?")
    assert "cannot be reached" in browser.text(".fault")
    browser.kept_to_itself("net::ERR_CONNECTION_REFUSED")


def test_a_model_that_is_loaded_is_waited_for(browser: Browser) -> None:
    with scripted_server() as (url, engine):
        ready, engine.ready = engine.ready, None
        browser.driver.get(url)
        browser.wait("document.getElementById('wait').textContent.includes('being loaded')")
        assert browser.js("return document.getElementById('send').disabled")
        engine.ready = ready
        browser.ready()
        browser.ask("One?")


def test_the_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser) -> None:
    with scripted_server(api_key="secret") as (url, engine):
        engine.script.steps = words("Yes.")
        browser.driver.get(f"{url}/health")
        browser.url = url
        browser.console(), browser.requested()
        browser.driver.get(url)
        browser.wait("document.getElementById('ask').open")
        browser.keys("wrong", Keys.ENTER)
        refused = "document.getElementById('why').textContent.includes('refused')"
        browser.wait(f"document.getElementById('ask').open && {refused}")
        browser.keys("secret", Keys.ENTER)
        browser.ready()
        assert browser.ask("One?") == "Yes."
        browser.reload()
        kept = browser.js("return JSON.stringify({...localStorage}) + document.cookie")
        assert "secret" not in kept
        assert not browser.js("return $('ask').open")
        browser.kept_to_itself("401 (Unauthorized)")


# What is said.

HOSTILE = """<script>document.title = 'taken'</script><img src=x onerror="document.title='taken'">
</script></style></textarea><svg onload=alert(1)><iframe src="javascript:alert(1)"></iframe>

[click](javascript:document.title='taken') [data](data:text/html,<script>alert(1)</script>)
<a href="https://evil.example">x</a> ![image](https://evil.example/secret.png)
\x1b[31mred\x1b]0;title\x07 \x9b31m \u202egnp.exe\u202c \u2066hidden\u2069 \x00
\u05e9\u05dc\u05d5\u05dd

$\\href{javascript:alert(1)}{x}$ $\\text{<b>}\\label{input}$ $$\\includegraphics{https://evil.example/y.png}$$
&#x202e;evil&#0; <a id=input>

{{constructor.constructor('alert(1)')()}} ${alert(1)} <!-- --> ]]> &lt;b&gt; &#60;

```"><script>alert(1)</script>
</code></pre><script>document.title = 'taken'</script>
```
| <b>x</b> | <script>alert(1)</script> |
"""
SHOWN = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">",
    "</script></style></textarea><svg onload=alert(1)>",
    "[click](javascript:document.title='taken')",
    "[data](data:text/html,<script>alert(1)</script>)",
    "\u241b[31mred\u241b]0;title\u2407 \u27e6U+009B\u27e731m",
    "\u27e6U+202E\u27e7gnp.exe\u27e6U+202C\u27e7 \u27e6U+2066\u27e7hidden\u27e6U+2069\u27e7 \u2400",
    '<a href="https://evil.example">x</a>',
    "</code></pre><script>document.title = 'taken'</script>",
    "<script>alert(1)</script>",
)
DECODED = "\u27e6U+202E\u27e7evil"


def test_the_policy_holds_and_the_console_tells(browser: Browser, scripted) -> None:
    """What the tests below rely on: a breach would be seen."""
    browser.open(scripted[0])
    assert browser.js("try { document.body.innerHTML = '<b>x'; } catch (e) { return e.name; }") == (
        "TypeError"
    )
    browser.js(
        "const i = new Image(); i.src = 'https://evil.example/x.png'; document.body.append(i)"
    )
    browser.js("fetch('https://evil.example/').catch(() => {})")
    browser.js("return new Promise((done) => setTimeout(done, 300))")
    told = "\n".join(browser.console())
    assert "TrustedHTML" in told and "img-src" in told and "connect-src" in told
    with pytest.raises(AssertionError):
        browser.console(), browser.js("console.warn('x')"), browser.kept_to_itself()


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_what_is_hostile_is_shown_and_does_nothing(
    browser: Browser, script: Script, piece: int
) -> None:
    call = [[Delta("tool_call", "<b>call</b>", 0)], *words(HOSTILE, "arguments", piece=piece)]
    script.steps = [*words(HOSTILE, "reasoning", piece=piece), *words(HOSTILE, piece=piece), *call]
    browser.ask("<img src=x onerror=alert(1)>")
    browser.click(".thought summary")
    for part in (".text", ".thought", ".call"):
        text = browser.text(part)
        raw = (*SHOWN[:-1], "&#x202e;evil") if part == ".call" else (*SHOWN, DECODED)
        assert not [shown for shown in raw if shown not in text], part
    assert browser.text(".call b") == "<b>call</b>"
    assert browser.text(".user .said") == "<img src=x onerror=alert(1)>"
    elements = "return [...document.querySelectorAll('#turns *')].map((node) => node.localName)"
    assert not {"script", "img", "iframe", "svg", "style"} & set(browser.js(elements))
    assert browser.js("return document.querySelectorAll('#turns [id]').length") == 0
    assert browser.js("return document.querySelectorAll('#turns math [href]').length") == 0
    links = browser.js("return [...document.querySelectorAll('#turns a')].map((a) => a.href)")
    assert all(link.startswith("https://evil.example") for link in links)
    before = browser.text("#turns")
    title = "<img src=x onerror=alert(1)> \u2013 Clocher"
    assert "evil.example" in before and browser.driver.title == title
    browser.js("for (const fold of document.querySelectorAll('details')) fold.open = false")
    before = browser.text("#turns")
    browser.reload()
    browser.js("for (const fold of document.querySelectorAll('details')) fold.open = false")
    assert browser.text("#turns") == before


def test_an_endless_line_wraps_and_what_is_finished_is_left_alone(
    browser: Browser, script: Script
) -> None:
    script.steps = words("First.\n\n" + "x" * 100_000, piece=20)
    script.token_s, script.tokens = 0.002, 10
    browser.js(
        "window.touched = 0; new MutationObserver((all) => { for (const one of all) "
        "if (document.querySelector('.text p')?.contains(one.target)) touched += 1; })"
        ".observe($('turns'), {childList: true, subtree: true, characterData: true})"
    )
    browser.send("Go.")
    browser.wait("turns[1].content.length > 5000")
    first = browser.js("return touched")
    browser.wait("!running", 30)
    assert browser.js("return [touched, turns[1].content.length]") == [first, 100_008]
    assert (
        browser.js("return document.querySelectorAll('.text p')[1].textContent.length") == 100_000
    )
    assert browser.js("return document.documentElement.scrollWidth") <= 1200
    assert browser.js("return log.scrollWidth - log.clientWidth") == 0


def test_long_answers_are_kept_whole(browser: Browser, script: Script) -> None:
    script.steps = words("y" * 600_000, piece=100_000)
    for _ in range(3):
        browser.ask("Much.")
    browser.reload()
    kept = browser.js("return turns.map((turn) => [turn.role, turn.content.length])")
    assert kept == [["user", 5], ["assistant", 600_000]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["word **word**\n\n", "- an item of a usual length, more or less\n", "x = 1\n", "word `word` "],
)
def test_an_answer_of_20000_tokens_stays_smooth(
    browser: Browser, script: Script, text: str
) -> None:
    fence = "```\n" if "=" in text else ""
    script.steps = words((fence + text * 80_000)[:80_000])
    script.token_s, script.tokens = 0.01, 20
    browser.js(
        "window.long = []; new PerformanceObserver((list) => { for (const one of list.getEntries())"
        " long.push(one.duration); }).observe({entryTypes: ['longtask']})"
    )
    browser.send("Go.")
    browser.wait("!running", 120)
    assert browser.js("return turns[1].tokens") == 20_000
    assert max(browser.js("return window.long"), default=0) < 500
