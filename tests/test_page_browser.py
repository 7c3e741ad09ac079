"""The chat page in a real Chromium: talk, stop, reload, keys, small windows, errors."""

import unicodedata

import pytest
from browser import CHROMIUM, DRIVER, MISSING, Browser
from scripted import Script, ScriptedEngine, scripted_server, words
from selenium.webdriver.common.keys import Keys
from serving import Served, serving, settled

from clocher_runtime.config.commands import CHAT_TEMPERATURE
from clocher_runtime.serve.errors import failure
from clocher_runtime.text.answers import Delta

pytest_plugins = ("page_fixtures",)
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)

CODE = "Look:\n\n```python\nprint('1 < 2')\n```\n\nand *so* **on**."


# With a real model.


def test_a_conversation_with_a_real_model(browser: Browser, speaker: Served) -> None:
    browser.open(speaker.url)
    browser.set(seed=3, max_tokens=600)
    browser.js(
        "window.lengths = []; new MutationObserver(() => lengths.push(document.body.innerText."
        "length)).observe(document.body, {subtree: true, childList: true, characterData: true})"
    )
    browser.send("Write a loop.")
    browser.wait("turns[1]?.content.length + turns[1]?.reasoning.length")
    browser.wait("!running")
    # The page notes each growth itself: asking it from here is slower than a small model.
    assert browser.js("return new Set(lengths).size") >= 3, "it did not grow while it was written"
    figures = browser.text(".figures")
    assert figures.startswith("600 tokens · ") and "tok/s" in figures
    used = browser.js("return turns[1].context")
    assert browser.text("#context") == f"{used} of 4,096 tokens" and used > 600
    browser.ask("Another one.")
    assert browser.js("return turns[3].context") > used + 600, "the first turn was not sent"
    before = browser.text("#turns")
    browser.reload()
    assert browser.text("#turns") == before and len(browser.js("return turns")) == 4
    browser.click("#new")
    assert browser.text("#turns") == "" and browser.text("#model") == "speaker"
    settled(speaker)
    browser.kept_to_itself()


def test_stop_frees_the_server(browser: Browser, speaker: Served) -> None:
    browser.open(speaker.url)
    # The page stops at its first growth: from here a small model might be done before the click.
    browser.set(temperature=0)
    browser.js(
        "new MutationObserver(() => {"
        " if (running && view?.turn === running.turn && view.body.innerText.length > 40)"
        " $('send').click()"
        "}).observe(document.body, {subtree: true, childList: true, characterData: true})"
    )
    browser.send("Write a loop.")
    browser.wait("!running")
    settled(speaker)
    assert speaker.metric("num_requests_running") == 0
    assert "Stopped." in browser.text("#turns") and browser.js("return turns[1].tokens") < 3000
    browser.kept_to_itself()


def test_a_model_that_cannot_chat_goes_on_with_a_text(browser: Browser) -> None:
    with serving() as server:
        browser.open(server.url)
        assert browser.js("return $('plain').checkVisibility()")
        assert "not made for chat" in browser.text("#plain")
        browser.set(seed=3, max_tokens=24, temperature=0.5)
        given = "def area(width):\n    return"
        browser.write(given)
        browser.click("#send")
        browser.wait("!running && turns.length === 2")
        wanted = server.ask(
            "/v1/completions", prompt=given, max_tokens=24, seed=3, temperature=0.5
        ).json()["choices"][0]["text"]
        assert browser.js("return turns[1].content") == wanted
        assert (
            browser.js("return document.querySelector('.document').textContent") == given + wanted
        )
        looks = (
            "const style = getComputedStyle(document.querySelector(arguments[0]));"
            "return style.color + style.fontWeight"
        )
        assert browser.js(looks, ".given") != browser.js(looks, ".made")
        browser.keys(Keys.ENTER)  # goes on
        browser.wait("!running && turns.length === 3")
        text = browser.js("return view.source()")
        assert text.startswith(given + wanted) and len(text) > len(given + wanted)
        browser.reload()
        assert browser.js("return document.querySelector('.document').textContent") == text
        browser.kept_to_itself()


# What is asked, and what is shown of the answer.


def test_the_block_that_is_denoised_stands_behind_the_text(
    browser: Browser, script: Script
) -> None:
    """Masks are places that fill in; nothing of them stays."""
    browser.js(
        "window.seen = []; new MutationObserver(() => { if (view?.canvas.isConnected) seen.push(["
        "turns.at(-1).content, view.canvas.parentNode.localName, [...view.canvas.childNodes].map("
        "(node) => node.localName ?? node.data)]) }).observe(document.body, {subtree: true, "
        "childList: true})"
    )
    script.steps, script.token_s = words("One two\n\n```\nfour\n```"), 0.1
    script.unsure = {1: [None, None, 66], 2: [None, 66], 5: [None, 67]}
    assert browser.ask("Count.") == "One two\n\n```\nfour\n```"
    seen = browser.js("return seen")
    for wanted in (
        ["One ", "p", ["i", "i", "Z"]],
        ["One two\n", "p", ["i", "Z"]],
        ["One two\n\n```\nfour\n``", "code", ["i", "["]],
    ):
        assert wanted in seen, seen
    assert browser.js("return document.querySelector('.canvas')") is None
    assert browser.text(".assistant code").strip() == "four"


def test_history_settings_thoughts_and_calls_go_where_they_belong(
    browser: Browser, script: Script
) -> None:
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    browser.click("#set")
    browser.keys("Be brief.")
    browser.set(tools=tools, temperature=0.5, top_p=0.9, max_tokens=400)
    browser.click("#settings .main")
    call = [[Delta("tool_call", "weather", 0)], *words('{"city": "Oslo"}', "arguments")]
    script.steps = [*words("It is about Oslo.", "reasoning"), *words("I look."), *call]
    browser.ask("How is it?")
    thought = "document.querySelector('.thought')"
    assert not browser.js(f"return {thought}.open") and "Thought for" in browser.text(".thought")
    assert "It is about Oslo." not in browser.text(".thought")
    browser.click(".thought summary")
    assert "It is about Oslo." in browser.text(".thought")
    browser.click(".thought summary")
    assert browser.text(".call b") == "weather" and '"city": "Oslo"' in browser.text(".call pre")
    assert browser.text(".text") == "I look."
    assert browser.js("return input.placeholder") == "Result of weather"
    script.steps = words(CODE)
    browser.ask("minus 3")
    asked = script.asked[-1]
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["weather"]
    system, user, said, told = asked["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "How is it?"}
    assert said["content"] == "I look." and said["reasoning_content"] == "It is about Oslo."
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert told["role"] == "tool" and told["content"] == "minus 3"
    assert told["tool_call_id"] == said["tool_calls"][0]["id"]
    sampling = script.submitted[-1].sampling
    assert (sampling["temperature"], sampling["top_p"]) == (0.5, 0.9)
    before = browser.text("#turns")
    browser.reload()
    assert browser.text("#turns") == before
    assert browser.js("return [$('system').value, $('tools').value]") == ["Be brief.", tools]


def test_a_setting_that_cannot_be_sent_is_shown_in_its_place(
    browser: Browser, script: Script
) -> None:
    browser.set(tools="{bad")
    browser.write("Hello")
    browser.click("#send")
    assert browser.js("return $('settings').open && document.activeElement.id") == "tools"
    why = browser.js("return $('tools').validationMessage")
    assert why.startswith("Functions is not a JSON list, such as [{") and "JSON at position" in why
    assert script.asked == [] and browser.js("return input.value") == "Hello"
    browser.js("$('settings').close()")
    browser.set(tools="[]")
    browser.click("#send")
    browser.wait("!running && turns.length === 2")
    assert len(script.asked) == 1


@pytest.mark.parametrize("model", [{}, {"temperature": 1.3, "top_p": 0.8}])
def test_it_draws_as_clocher_chat_does(browser: Browser, model: dict[str, float]) -> None:
    wanted = (model.get("temperature", CHAT_TEMPERATURE), model.get("top_p", 1))
    with scripted_server(sampling=model) as (url, engine):
        engine.script.steps = words("Yes.")
        browser.open(url)
        browser.ask("Is it?")
        sampling = engine.script.submitted[-1].sampling
        assert (sampling["temperature"], sampling.get("top_p", 1)) == wanted
        shown = browser.js("return [$('temperature').placeholder, $('top_p').placeholder]")
        assert tuple(map(float, shown)) == wanted
        browser.kept_to_itself()


def test_markdown_is_shown_while_it_is_written(browser: Browser, script: Script) -> None:
    text = (
        "# Head\n\nOne *slanted* and **strong** `code`.\nNext line.\n\n1. first\n   - inner\n"
        "2. second\n\n> said\n\n---\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "[paper](https://example.org/x) https://example.org/y. [no](javascript:alert(1)) 2*3*4\n\n"
        "```html\n<b>bold</b>\n```\nafter"
    )
    script.steps = words(text)
    browser.ask("Show me.")
    shown = browser.js(
        "const tags = (n) => [...n.children].map((c) => c.localName + (c.localName === 'li' || "
        "c.localName === 'ol' || c.localName === 'ul' ? '(' + tags(c) + ')' : ''));"
        "const last = document.querySelector('.text .last'); last.replaceWith(...last.childNodes);"
        "return tags(document.querySelector('.text')).join(' ')"
    )
    assert shown == "h3 p ol(li(ul(li())),li()) blockquote hr div p figure p"
    links = browser.js(
        "return [...document.querySelectorAll('.text a')].map((a) => [a.href, a.rel])"
    )
    rel = "noopener noreferrer"
    assert links == [["https://example.org/x", rel], ["https://example.org/y", rel]]
    assert "paper (example.org)" in browser.text(".text")
    assert "[no](javascript:alert(1)) 2*3*4" in browser.text(".text")
    assert browser.text(".text em") == "slanted" and browser.text(".text strong") == "strong"
    assert browser.text(".text td") == "1" and browser.text(".text pre") == "<b>bold</b>\n"
    assert browser.text(".text p") == "One slanted and strong code.\nNext line."


def test_tasks_strikes_math_and_code_have_elements_of_their_own(
    browser: Browser, script: Script
) -> None:
    script.steps = words(
        "- [x] done\n- [ ] open\n- [link](https://example.org)\n\n~~gone~~ $5 and $10, $e^x$ and "
        "\\(y\\), `$z$`\n\n$$\n\\frac{1}{2}\n$$\n\n\\[ a = b \\]\n\n| a |\n|--:|\n| 1 |\n\n"
        "```python\ndef f(): return '<b>'\n```\n\n```nonsense\nx\n```\n\n![a](https://e.example/a.png)",
        piece=9,
    )
    browser.ask("Show me.")
    boxes = "return [...document.querySelectorAll('.task input')].map((each) => each.checked)"
    assert browser.js(boxes) == [True, False]
    assert browser.text(".text li") == "done" and browser.text(".text s") == "gone"
    assert "$5 and $10" in browser.text(".text p")
    assert browser.text(".text p code") == "$z$"
    shown = browser.js(
        "return [...document.querySelectorAll('.text math')].map((each) => [each.textContent,"
        " each.namespaceURI.endsWith('MathML'), each.display])"
    )
    assert [unicodedata.normalize("NFKC", text) for text, _, _ in shown] == ["ex", "y", "12", "a=b"]
    assert all(is_math for _, is_math, _ in shown)
    assert len(browser.js("return [...document.querySelectorAll('div.math')]")) == 2
    assert browser.js("return document.querySelector('.text td').style.textAlign") == "right"
    assert browser.text(".text pre .hl-keyword") == "def"
    assert browser.text(".text pre .hl-string") == "'<b>'"
    assert browser.text(".text figure:last-of-type pre") == "x\n"
    assert browser.js("return document.querySelectorAll('img').length") == 0
    assert "image: a (e.example)" in browser.text(".text")


def test_a_text_reads_the_same_however_it_comes(browser: Browser, script: Script) -> None:
    """Blocks that are final while the text grows are those of the whole text."""
    text = (
        "Para\n# Head\n#tag\nmore\n- a\n\n  b\n- c\ntail\n1. x\n2. y\n> q\nlazy\n| a |\n|---|\n"
        "| b |\nend\n---\n~~~\n```\n~~~\n$$\nx\n- y\n$$\n$$ a\n\nb\n***\n**b**\n```js\n1"
    )
    made = browser.js(
        "const tree = (node) => node.nodeType === 3 ? node.data : [node.localName,"
        " ...[...node.childNodes].map(tree)];"
        "return arguments[0].map((step) => {"
        "  const text = arguments[1], root = document.createElement('div');"
        "  const one = new markdown.Markdown(root);"
        "  for (let at = step; at < text.length + step; at += step) one.update(text.slice(0, at));"
        "  const last = root.querySelector('.last');"
        "  last.replaceWith(...last.childNodes);"
        "  return JSON.stringify(tree(root)); })",
        [1, 3, 7, 1000],
        text,
    )
    assert len(set(made)) == 1, made
    browser.ask("?")


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_answers_and_code_can_be_copied(
    browser: Browser, script: Script, has_clipboard: bool
) -> None:
    if not has_clipboard:  # as on http://192.168.0.2
        browser.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    else:
        granted = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        browser.driver.execute_cdp_cmd("Browser.grantPermissions", granted)
    script.steps = words(CODE)
    browser.ask("Show me.")
    for button, wanted in (
        ("figure button", "print('1 < 2')\n"),
        (".assistant .foot .copy", CODE),
    ):
        browser.js("document.querySelector(arguments[0]).scrollIntoView()", button)
        browser.driver.find_element("css selector", button).click()
        browser.wait(
            "[...document.querySelectorAll('button')].some((b) => b.innerText === 'Copied')"
        )
        browser.js("input.value = ''; input.focus()")
        browser.chord(Keys.CONTROL, "v")
        assert browser.wait("input.value") == wanted
        browser.js("input.value = ''")


def contents(browser: Browser) -> list[str]:
    """Return the contents of the branch that is shown, as the page has them."""
    return browser.js("return turns.map((turn) => turn.content)")


def test_any_turn_can_be_made_again_or_edited_and_both_branches_stay(
    browser: Browser, script: Script
) -> None:
    for question, answer in (("One?", "First."), ("Two?", "Second.")):
        script.steps = words(answer)
        browser.ask(question)
    script.steps = words("Other.")
    browser.driver.find_elements("css selector", ".again")[0].click()
    browser.wait("!running && turns.length === 2")
    assert contents(browser) == ["One?", "Other."]
    assert script.asked[-1] == script.asked[0], "the same question is asked again"
    assert "2 / 2" in browser.text(".assistant .branch")
    browser.click("[title='Previous branch']")
    assert contents(browser) == ["One?", "First.", "Two?", "Second."]
    assert browser.text("#turns").startswith("One?") and "Second." in browser.text("#turns")

    script.steps = words("Third.")
    browser.driver.find_elements("css selector", ".user .change")[0].click()
    browser.keys("!", Keys.ESCAPE)
    assert contents(browser)[0] == "One?", "Escape leaves the turn as it was"
    browser.driver.find_elements("css selector", ".user .change")[0].click()
    browser.keys("!", Keys.ENTER)
    browser.wait("!running && turns.length === 2")
    assert contents(browser) == ["One?!", "Third."]
    assert [each["content"] for each in script.asked[-1]["messages"]] == ["One?!"]

    browser.driver.find_elements("css selector", ".assistant .change")[0].click()
    browser.keys(" And more.")
    browser.chord(Keys.CONTROL, Keys.ENTER)
    browser.wait("turns[1].content === 'Third. And more.'")
    browser.ask("Five?")
    assert [each["content"] for each in script.asked[-1]["messages"]] == [
        "One?!",
        "Third. And more.",
        "Five?",
    ], "the prompt has the edited answer"
    browser.reload()
    assert contents(browser)[:2] == ["One?!", "Third. And more."]
    browser.driver.find_elements("css selector", "[title='Previous branch']")[0].click()
    assert contents(browser) == ["One?", "Other."], "the newest of the branches below"


def test_figures_say_what_part_of_the_bandwidth_is_used(
    browser: Browser, script: Script, scripted: tuple[str, ScriptedEngine]
) -> None:
    script.steps, script.token_s = words("slow " * 20), 0.05
    browser.ask("Write.")
    rate = browser.js("return turns[1].rate")
    share = round(rate * 1e9 / 40e9 * 100)
    assert 10 < rate < 25 and browser.text(".figures").endswith(f"· {share} % of bandwidth")
    title = browser.js("return document.querySelector('.figures').title")
    assert "1.00 GB of weights a token" in title and "40 GB/s" in title
    script.steps, script.token_s = words("fast " * 100), 0.005
    browser.ask("Write.")
    assert browser.text(".turn:last-child .figures").endswith("% of bandwidth: from caches")
    browser.js("model.meta.read_gbps = null; view.showFoot()")
    assert browser.text(".turn:last-child .figures").endswith(" tok/s")
    untold = "const turn = {tokens: 3}; answers.count({turn}, {choices: [{}]}); return turn.tokens"
    assert browser.js(untold) == 4, "pieces are counted"


# Reading and typing.


def test_scrolling_follows_until_the_reader_scrolls_up(browser: Browser, script: Script) -> None:
    script.steps, script.token_s = words("line\n\n" * 400), 0.004
    browser.send("Write much.")
    browser.wait("log.scrollHeight > log.clientHeight + 300")
    browser.wait("log.scrollHeight - log.scrollTop - log.clientHeight < 60")
    browser.js("log.scrollTop -= 250")
    at = browser.wait("!state.follows && log.scrollTop")
    height = browser.js("return log.scrollHeight")
    browser.wait(f"log.scrollHeight > {height} + 200")
    assert browser.js("return log.scrollTop") == at and not browser.js("return $('down').hidden")
    browser.click("#down")
    browser.wait("state.follows && running")
    browser.wait("!running")
    assert browser.js("return log.scrollHeight - log.scrollTop - log.clientHeight") < 2


def test_everything_can_be_done_with_keys(browser: Browser, script: Script) -> None:
    script.steps, script.token_s = words("word " * 400), 0.01
    assert browser.js("return document.activeElement.id") == "input"
    browser.keys("Hello")
    browser.chord(Keys.SHIFT, Keys.ENTER)
    browser.keys("there", Keys.ENTER)
    browser.wait("running && view.body.innerText.length > 10")
    assert script.asked[-1]["messages"][-1]["content"] == "Hello\nthere"
    assert browser.js("return [$('send').ariaLabel, log.ariaBusy]") == ["Stop", "true"]
    browser.keys(Keys.ESCAPE)
    browser.wait("!running")
    assert browser.text("#status") == "Stopped." and browser.js("return log.ariaBusy") == "false"
    seen = []
    for _ in range(16):
        browser.keys(Keys.TAB)
        name = browser.js(
            "const a = document.activeElement, s = getComputedStyle(a);"
            "if (a === document.body) return 'body';"
            "const around = getComputedStyle(a.parentNode).boxShadow !== 'none';"
            "const seen = s.outlineStyle !== 'none' || around;"
            "return (a.ariaLabel || a.innerText || a.title) + (seen ? '' : ' UNSEEN')"
        )
        seen.append(name)
    for wanted in (
        "New chat",
        "Search chats",
        "List of chats",
        "Settings of this chat",
        "More",
        "Conversation",
        "Copy",
        "Regenerate",
        "Edit",
        "Attach text files",
        "Message",
    ):
        assert wanted in seen, seen
    assert not [name for name in seen if "UNSEEN" in name]
    browser.js("$('more').focus()")
    browser.keys("/")
    assert browser.js("return [document.activeElement.id, input.value]") == ["input", ""]
    browser.keys("a/b")
    assert browser.js("return input.value") == "a/b"
    browser.js("$('set').focus()")
    browser.keys(Keys.ENTER)
    assert browser.js("return $('settings').open && document.activeElement.id") == "system"
    browser.keys(Keys.ESCAPE)
    assert browser.js("return !$('settings').open && document.activeElement.id") == "set"
    unnamed = browser.js(
        "return [...document.querySelectorAll('button, input, textarea')].filter((n) => "
        "!(n.ariaLabel || n.innerText || n.title || n.labels?.length)).map((n) => n.outerHTML)"
    )
    assert not unnamed


CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const colour = parse(getComputedStyle(node).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
};
const found = [];
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!(own || node.placeholder) || !node.checkVisibility() || node.disabled) continue;
  const style = getComputedStyle(node, own ? null : '::placeholder');
  const [a, b] = [light(parse(style.color)), light(ground(node))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), `${node.localName}.${node.className} ${node.id}`]);
}
return found.sort((x, y) => x[0] - y[0]);
"""


def test_dark_and_light_can_be_read(browser: Browser, script: Script) -> None:
    call = [[Delta("tool_call", "weather", 0)], *words('{"city": "Oslo"}', "arguments")]
    script.steps = [
        *words("Hm.", "reasoning"),
        *words(CODE + "\n\n> q\n\nhttps://example.org"),
        *call,
    ]
    browser.ask("Show me.")
    script.refusal = failure("rate_limit_exceeded", waiting=8)
    browser.ask("12")
    browser.click(".thought summary")
    paper = "return getComputedStyle(document.body).backgroundColor"
    papers = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        papers.append(browser.js(paper))
        contrasts = browser.js(CONTRAST)
        assert len(contrasts) > 15 and contrasts[0][0] >= 4.5, contrasts[:3]
    assert papers[0] != papers[1]
    browser.click("#more")
    browser.click("#theme")
    assert browser.js(paper) == papers[0], "the switch turns the dark page light"
    browser.reload()
    assert browser.js(paper) == papers[0]
    browser.click("#more")
    browser.click("#theme")
    assert browser.js(paper) == papers[1]


def test_the_ring_of_the_composer_is_of_one_width(browser: Browser, script: Script) -> None:
    browser.js("input.focus()")
    box = browser.js("return $('composer').getBoundingClientRect().toJSON()")
    clip = {"x": box["x"] - 4, "y": box["y"] - 4, "width": box["width"], "height": 30, "scale": 1}
    taken = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
    widths = browser.run(
        """const image = new Image();
        image.onload = () => {
          const {width, height} = image, sheet = new OffscreenCanvas(width, height);
          const paint = sheet.getContext('2d');
          paint.drawImage(image, 0, 0);
          const blue = paint.getImageData(0, 0, width, height).data.filter((_, at) => at % 4 === 2);
          const down = blue.filter((_, at) => at % width === width >> 1);
          const across = blue.slice(-width).slice(0, 12);  // the accent has little blue
          done([down, across].map((strip) => strip.filter((value) => value < 90).length));
        };
        image.src = 'data:image/png;base64,' + arguments[0];""",
        taken["data"],
    )
    assert widths == [2, 2]


def test_a_window_of_360_pixels_is_enough(browser: Browser, script: Script) -> None:
    browser.size(360, 640)
    browser.js("$('name').textContent = 'A-Model-With-A-Long-Name-Instruct.Q4_K_M'")
    wide = f"{CODE}\n\n{'x' * 500} {'| a long cell ' * 9}\n\n" + "| a long cell " * 9
    long_call = [[Delta("tool_call", "w" * 60, 0)], *words(f'{{"a": "{"x" * 200}"}}', "arguments")]
    script.steps = [
        *words("y" * 300, "reasoning"),
        *words(wide + "\n\n```\n" + "z" * 300),
        *long_call,
    ]
    browser.ask("v" * 120)
    browser.click(".thought summary")
    for shown in ("", "$('settings').showModal()"):
        browser.js(shown)
        assert browser.js("return document.documentElement.scrollWidth") <= 360
        assert browser.js("return log.scrollWidth - log.clientWidth") == 0
        outside = browser.js(
            "return [...document.querySelectorAll('button, input, textarea, p, article')].filter("
            "(n) => n.checkVisibility()).map((n) => [n.getBoundingClientRect(), n])"
            ".filter(([box]) => box.left < 0 || box.right > 360).map(([, n]) => n.outerHTML)"
        )
        assert not outside
    small = browser.js(
        "return [...document.querySelectorAll('header button, #send')].filter((n) => "
        "Math.min(n.offsetWidth, n.offsetHeight) < 32).map((n) => n.id)"
    )
    assert not small
