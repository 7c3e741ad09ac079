"""Fixtures of tests that open the chat page in a real Chromium."""

from collections.abc import Iterator

import pytest
from browser import Browser
from scripted import Script, ScriptedEngine, scripted_server
from serving import Served, model_with_template, serving
from test_serve_answers import TEMPLATE

from clocher_runtime.checkpoints.locate import embedded_model


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    one = Browser()
    yield one
    one.driver.quit()


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[str, ScriptedEngine]]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def script(browser: Browser, scripted: tuple[str, ScriptedEngine]) -> Iterator[Script]:
    """Open the page of the scripted server; see afterwards that it asked nobody else."""
    url, engine = scripted
    engine.script = Script()
    browser.open(url)
    yield engine.script
    browser.kept_to_itself("Failed to load resource: the server responded with a status of")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("models") / "speaker"
    model = model_with_template(directory, embedded_model(), TEMPLATE)
    with serving("--model-dir", model, "--queue", 1) as one:
        yield one
