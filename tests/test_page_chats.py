"""Many chats in the page, in a real Chromium: the list, search, files in and out, settings."""

import json
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, MISSING, Browser
from scripted import Script, words
from selenium.webdriver.common.keys import Keys

pytest_plugins = ("page_fixtures",)
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)

TITLES = "return [...document.querySelectorAll('#list a > span')].map((each) => each.innerText)"


def talk_of(browser: Browser, script: Script, question: str, answer: str) -> None:
    """Begin a chat with one question and its answer."""
    script.steps = words(answer)
    browser.chord(Keys.ALT, "n")
    browser.wait("!turns.length")
    browser.ask(question)


def choose(browser: Browser, title: str) -> None:
    """Open the chat whose title has these words."""
    titles = "[...document.querySelectorAll('#list a')]"
    browser.wait(f"{titles}.some((each) => each.title.includes('{title}'))")
    browser.js(f"{titles}.find((each) => each.title.includes('{title}')).click()")


@pytest.fixture
def three(browser: Browser, script: Script) -> Script:
    for question, answer in (("Apples?", "Red."), ("Pears?", "Green."), ("Plums?", "Blue.")):
        talk_of(browser, script, question, answer)
    browser.wait("document.querySelectorAll('#list li').length === 3")
    return script


def exported(browser: Browser, folder: Path, button: str) -> Path:
    """Click a button of the menu; return the file that it writes."""
    folder.mkdir()
    where = {"behavior": "allow", "downloadPath": str(folder)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    browser.click("#more")
    browser.click(button)
    for _ in range(100):
        browser.run("setTimeout(done, 50)")
        if files := [file for file in folder.iterdir() if file.suffix in (".json", ".md")]:
            return files[0]
    raise AssertionError("nothing was written")


def test_chats_are_listed_opened_and_kept(browser: Browser, three: Script) -> None:
    assert browser.js(TITLES) == ["Plums?", "Pears?", "Apples?"]
    browser.click("#list li:nth-child(3) a")
    browser.wait("turns[0]?.content === 'Apples?'")
    assert browser.text("#name") == "Apples?" and "Red." in browser.text("#turns")
    assert browser.text("#list [aria-current]") == "Apples?"
    three.steps = words("Sweet.")
    browser.ask("And taste?")
    assert [each["content"] for each in three.asked[-1]["messages"]] == [
        "Apples?",
        "Red.",
        "And taste?",
    ]
    browser.wait(f"(() => {{ {TITLES} }})()[0] === 'Apples?'")
    browser.driver.back()
    browser.wait("turns[0]?.content === 'Plums?'")
    browser.reload()
    assert browser.js("return turns[1].content") == "Blue."
    assert browser.js(TITLES) == ["Apples?", "Plums?", "Pears?"]


def test_the_list_is_used_with_keys(browser: Browser, three: Script) -> None:
    browser.chord(Keys.CONTROL, "k")
    assert browser.js("return document.activeElement.id") == "search"
    browser.keys("gReEn")
    browser.wait("document.querySelectorAll('#list li').length === 1")
    assert browser.js(TITLES) == ["Pears?"] and "Green." in browser.text("#list small")
    browser.keys(Keys.ARROW_DOWN, Keys.ENTER)
    browser.wait("turns[0]?.content === 'Pears?'")
    browser.chord(Keys.CONTROL, "k")
    browser.keys("nowhere")
    browser.wait("!document.querySelectorAll('#list li').length")
    assert browser.text("#none") == "Nothing found"
    browser.chord(Keys.CONTROL, "a")
    browser.keys(Keys.DELETE)
    browser.wait("document.querySelectorAll('#list li').length === 3")

    browser.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.F2)
    browser.keys("<b>Fruit</b>", Keys.ENTER)
    browser.wait(f"(() => {{ {TITLES} }})().includes('<b>Fruit</b>')")
    browser.wait("document.activeElement.closest('#list li')")
    browser.keys(Keys.F2, "not this", Keys.ESCAPE)
    assert "<b>Fruit</b>" in browser.js(TITLES)
    assert browser.text("#name") == "<b>Fruit</b>"

    browser.wait("document.activeElement.closest('#list li')")
    browser.keys(Keys.DELETE)
    browser.wait("document.querySelectorAll('#list li').length === 2")
    assert browser.text("#toast span").startswith("Deleted \u201c<b>Fruit</b>")
    assert browser.js("return turns.length") == 0, "the open one was deleted"
    browser.keys(Keys.ENTER)  # Undo has the focus
    browser.wait("turns[0]?.content === 'Pears?'")
    assert len(browser.js(TITLES)) == 3
    browser.reload()
    assert browser.text("#name") == "<b>Fruit</b>" and len(browser.js(TITLES)) == 3


def test_an_export_comes_back(browser: Browser, three: Script, tmp_path: Path) -> None:
    three.steps = words("Purple, `a|b`.")
    browser.click(".again")
    browser.wait("!running && turns[1].content.startsWith('Purple')")
    text = exported(browser, tmp_path / "a", "#markdown").read_text("utf-8")
    assert text == "# Plums?\n\n## You\n\nPlums?\n\n## scripted-8b\n\nPurple, `a|b`.\n"
    one = exported(browser, tmp_path / "b", "#json")
    assert one.name == "Plums-.json" and len(json.loads(one.read_text())["chats"]) == 1
    everything = exported(browser, tmp_path / "c", "#all")
    chats = json.loads(everything.read_text())["chats"]
    assert {chat["turns"][0]["content"] for chat in chats} == {"Apples?", "Pears?", "Plums?"}
    for chat in range(3):
        browser.js("document.querySelector('#list li button:last-of-type').click()")
        browser.wait(f"document.querySelectorAll('#list li').length === {2 - chat}")
    browser.driver.find_element("id", "load").send_keys(str(everything))
    browser.wait("document.querySelectorAll('#list li').length === 3")
    assert browser.text("#toast span") == "Imported 3 chats"
    choose(browser, "Plums?")
    browser.wait("turns[1]?.content.startsWith('Purple')")
    browser.click("[title='Previous branch']")
    assert browser.js("return turns.map((turn) => turn.content)") == ["Plums?", "Blue."]
    back = json.loads(exported(browser, tmp_path / "d", "#all").read_text())["chats"]

    def told(chats: list[dict]) -> list:
        known = ("role", "content", "parent", "tokens", "finish")
        turns = [[[turn.get(key) for key in known] for turn in chat["turns"]] for chat in chats]
        return sorted(turns, key=str)

    assert told(back) == told(chats)


def test_a_file_that_is_no_export_is_harmless(
    browser: Browser, script: Script, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    for text, why in (("{", "JSON"), ("[]", "not an export"), ('{"chats": []}', "not an export")):
        bad.write_text(text, encoding="utf-8")
        browser.driver.find_element("id", "load").send_keys(str(bad))
        browser.wait(f"!$('toast').hidden && $('toast').innerText.includes('{why}')")
        browser.js("$('toast').hidden = true")
    turns = [
        {"role": "user", "id": 7, "parent": 9, "content": "<img src=x onerror=alert(1)>"},
        {"role": "system", "content": "?"},
        {"role": "assistant", "id": {}, "parent": 7, "calls": "no", "content": ["x"], "rate": "x"},
        {"role": "assistant", "id": 9, "parent": 7, "content": "<script>alert(1)</script>"}
        | {"calls": [{"name": "<b>", "arguments": 3}], "fault": "<i>", "__proto__": {"x": 1}},
        None,
    ]
    chat = {"title": ["x"], "turns": turns, "tip": 9, "settings": {"system": 4, "tools": "[}"}}
    told = {"format": "clocher-chats", "version": 1, "chats": [chat, 3, {"turns": "?"}]}
    bad.write_text(json.dumps(told), encoding="utf-8")
    browser.driver.find_element("id", "load").send_keys(str(bad))
    browser.wait("document.querySelectorAll('#list li').length === 3")
    browser.js("$('toast').hidden = true")
    choose(browser, "onerror")
    browser.wait("turns.length === 2")
    assert "<script>alert(1)</script>" in browser.text("#turns")
    assert not browser.js("return document.querySelectorAll('#turns :is(img, script, i)').length")


def test_files_are_sent_as_text(browser: Browser, script: Script, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("A ```fence``` here\n", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / "large.txt").write_text("x" * (1 << 21), encoding="utf-8")
    pick = browser.driver.find_element("id", "pick")
    pick.send_keys(str(tmp_path / "picture.png"))
    browser.wait("$('toast').innerText === 'picture.png is not text in UTF-8'")
    pick.send_keys(str(tmp_path / "large.txt"))
    browser.wait("$('toast').innerText.startsWith('large.txt is larger than')")
    pick.send_keys(str(tmp_path / "notes.md"))
    browser.wait("document.querySelectorAll('#files li').length === 1")
    script.steps = words("Read.")
    browser.ask("What is it?")
    (message,) = script.asked[-1]["messages"]
    fenced = "File notes.md:\n````\nA ```fence``` here\n````\n"
    assert message == {"role": "user", "content": f"{fenced}\nWhat is it?"}
    assert browser.text(".user summary").startswith("notes.md") and not browser.text("#files")
    assert "A ```fence```" not in browser.text(".user"), "it is folded"
    browser.reload()
    browser.click(".user summary")
    assert "A ```fence``` here" in browser.text(".file pre")


def test_each_chat_has_settings_of_its_own(browser: Browser, three: Script) -> None:
    browser.set(system="Be brief.", temperature=0.1, top_k=7, min_p=0.05)
    browser.click("#set")
    browser.click("#settings .main")
    browser.ask("Plums again?")
    assert three.asked[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    sampled = three.submitted[-1].sampling
    assert [sampled[key] for key in ("temperature", "top_k", "min_p")] == [0.1, 7, 0.05]
    choose(browser, "Pears?")
    browser.wait("turns[0]?.content === 'Pears?'")
    assert browser.js("return [$('system').value, $('temperature').value]") == ["", ""]
    browser.ask("Pears again?")
    assert three.asked[-1]["messages"][0]["role"] == "user"
    browser.reload()
    choose(browser, "Plums?")
    browser.wait("turns[0]?.content === 'Plums?'")
    assert browser.js("return [$('system').value, $('min_p').value]") == ["Be brief.", "0.05"]
    browser.click("#set")
    browser.click("#usual")
    browser.click("#settings .main")
    browser.chord(Keys.ALT, "n")
    browser.wait("!turns.length && $('system').value === 'Be brief.'")


def test_an_answer_goes_on_while_another_chat_is_read(browser: Browser, three: Script) -> None:
    browser.chord(Keys.ALT, "n")
    browser.wait("!turns.length")
    three.steps, three.token_s = words("slow " * 30), 0.05
    browser.send("Figs?")
    browser.wait("document.querySelector('#list .writes')")
    browser.write("a draft")
    choose(browser, "Pears?")
    browser.wait("turns[0]?.content === 'Pears?'")
    assert not browser.js("return running") and browser.js("return input.value") == ""
    choose(browser, "Figs?")
    browser.wait("running && turns[1].content.length > 10")
    assert browser.js("return input.value") == "a draft"
    browser.wait("!running")
    assert browser.text(".text").strip() == ("slow " * 30).strip()
    browser.wait("!document.querySelector('#list .writes')")
    browser.send("More?")
    browser.wait("running && turns[3].content.length > 10")
    browser.click("#more")
    browser.click("#delete")
    browser.wait("document.querySelectorAll('#list li').length === 3 && !turns.length")
    browser.run("setTimeout(done, 400)")
    assert sorted(browser.js(TITLES)) == ["Apples?", "Pears?", "Plums?"], "it stays deleted"
    browser.wait("document.activeElement.innerText === 'Undo'")
    browser.keys(Keys.ENTER)
    browser.wait("turns[3]?.note === 'Stopped.'")


def test_another_tab_sees_what_changed(browser: Browser, three: Script) -> None:
    first = browser.driver.current_window_handle
    address = browser.js("return location.href")
    browser.driver.switch_to.new_window("tab")
    try:
        browser.driver.get(address)
        browser.ready()
        three.steps = words("Seen?")
        browser.ask("More plums?")
        browser.run("setTimeout(done, 300)")
        browser.driver.switch_to.window(first)
        browser.wait(
            "turns.length === 4 && document.querySelector('#turns').innerText.includes('Seen?')"
        )
        browser.driver.switch_to.window(browser.driver.window_handles[-1])
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(first)


FILL = """
const [count, each, text] = arguments;
(async () => {
  for (let at = 0; at < count; at++) {
    const chat = talk.newChat('chat', {});
    for (let turn = 0; turn < each; turn += 2) {
      talk.add(chat, {role: 'user', content: `Question ${turn} of chat ${at}`});
      talk.add(chat, {role: 'assistant', content: text, reasoning: '', calls: [], tokens: 9});
    }
    await store.save(talk.headOf(chat), chat);
    window.last = chat.id;
  }
  done();
})();
"""
TEXT = (
    "# Head\n\nSome *text* of a usual answer, $x^2$.\n\n- one\n- two\n\n```python\nx = 1\n```\n" * 3
)
SHOWN = """
new MutationObserver((_, self) => {
  if (!document.querySelector('.turn') || !document.querySelector('#list li')) return;
  self.disconnect();
  requestAnimationFrame(() => setTimeout(() => performance.mark('shown')));
}).observe(document, {subtree: true, childList: true});
"""


@pytest.mark.parametrize(("count", "each"), [(50, 40), (2, 2000)])
def test_50_chats_of_2000_turns_are_painted_within_a_second(
    browser: Browser, script: Script, count: int, each: int
) -> None:
    browser.run(FILL, count, each, TEXT)
    last = browser.js("return window.last")
    script_id = browser.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": SHOWN}
    )
    times = []
    for _ in range(3):  # the machine of a test run is busy: the best of three
        browser.driver.get(f"{browser.url}/health")
        browser.driver.get(f"{browser.url}/#{last}")
        browser.ready()
        browser.wait("performance.getEntriesByName('shown').length")
        times.append(
            browser.js(
                "return [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
                "performance.getEntriesByName('shown')[0].startTime]"
            )
        )
    browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script_id)
    assert min(first for first, _ in times) < 1000, times
    assert min(shown for _, shown in times) < 2000, times
    assert len(browser.js(TITLES)) == count
    assert browser.text(".turn:last-child").startswith("Head")
    browser.js("log.scrollTop = 0")
    browser.wait("state.views.length > 30")
    browser.js("$('search').value = 'chat 1'; $('search').oninput()")
    matching = sum("chat 1" in f"chat {at}" for at in range(count))
    browser.wait(f"document.querySelectorAll('#list li').length === {matching}", 5)
