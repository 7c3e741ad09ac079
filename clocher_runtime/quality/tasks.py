"""Known tasks from local files, as lm-evaluation-harness 0.4 words and measures them.

Source: its lm_eval/tasks/{mmlu/default, hellaswag, arc, gsm8k, humaneval, lambada}. Files are those
of the data sets as JSON lines, `.gz` or not; the examples of a prompt are the first of the file of
development or training lines beside them (the harness draws those of GSM8K).
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from clocher_kernels.errors import FormatError, ModelNotFound, UsageError
from clocher_runtime.api import LanguageModel
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_object, read_as
from clocher_runtime.engine.session import Session
from clocher_runtime.quality import likelihood
from clocher_runtime.quality.likelihood import (
    MOST_BYTES,
    Item,
    Likelihood,
    Progress,
    Question,
    Scorer,
    Target,
    means,
)
from clocher_runtime.quality.run_program import passes
from clocher_runtime.text.tokenizer import Tokenizer

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_IGNORED = re.compile(r"(?s)[,$]|.*#### ")
_INVALID = "[invalid]"
_BATCHES = 8
"""How many batches of items are done before they are kept."""


class Asked(NamedTuple):
    """A prompt whose greedy completion is judged: metric -> 0 or 1."""

    prompt: str
    stop: tuple[str, ...]
    max_new: int
    shown: str  # what follows the prompt where it is an example
    judge: Callable[[str], dict[str, float]]


class _Line(Protocol):
    def item(self) -> Item | Asked: ...


class Mmlu(msgspec.Struct):
    """A line of MMLU; `answer` is an index or a letter."""

    question: str
    choices: list[str]
    answer: int | str
    subject: str = ""

    def item(self) -> Item:
        """Return the question, answered by a letter."""
        letters = _LETTERS[: len(self.choices)]
        lines = [f"{letter}. {text}" for letter, text in zip(letters, self.choices, strict=True)]
        answer = self.answer if isinstance(self.answer, int) else letters.find(self.answer)
        asked = "\n".join([self.question.strip(), *lines, "Answer:"])
        return Question(asked, tuple(letters), answer, " ")


class HellaSwag(msgspec.Struct):
    """A line of HellaSwag."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: str | int

    def item(self) -> Item:
        """Return the question, answered by an ending."""
        about = f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}"
        endings = tuple(map(_without_marks, self.endings))
        return Question(_without_marks(about), endings, int(self.label), " ")


class _Choices(msgspec.Struct):
    text: list[str]
    label: list[str]


class Arc(msgspec.Struct, rename={"key": "answerKey"}):
    """A line of ARC: as published, or with `choices`, `labels` and `answer` side by side."""

    question: str
    choices: list[str] | _Choices
    labels: list[str] = []
    answer: str = ""
    key: str = ""

    def item(self) -> Item:
        """Return the question, answered by the text of a choice."""
        own = self.choices
        texts, labels = (own.text, own.label) if isinstance(own, _Choices) else (own, self.labels)
        answer = labels.index(self.key or self.answer)
        return Question(f"Question: {self.question}\nAnswer:", tuple(texts), answer, " ")


class Gsm8k(msgspec.Struct):
    """A line of GSM8K."""

    question: str
    answer: str

    def item(self) -> Asked:
        """Return the question; the number after "####", or the last one, is the answer."""
        stop = ("Question:", "</s>", "<|im_end|>")
        return Asked(
            f"Question: {self.question}\nAnswer:", stop, 256, f" {self.answer}", self._judge
        )

    def _judge(self, said: str) -> dict[str, float]:
        marked, numbers = _MARKED.search(said), _NUMBER.findall(said)
        strict = marked[1] if marked else _INVALID
        flexible = next(filter(None, numbers[-1])) if numbers else _INVALID
        right = _number(self.answer)
        return {
            "exact_match_strict": float(_number(strict) == right),
            "exact_match_flexible": float(_number(flexible) == right),
        }


class HumanEval(msgspec.Struct):
    """A line of HumanEval."""

    prompt: str
    test: str
    entry_point: str

    def item(self) -> Asked:
        """Return the function to be completed; the tests are run."""
        stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
        return Asked(self.prompt, stop, 1024, "", self._judge)

    def _judge(self, said: str) -> dict[str, float]:
        program = f"{self.prompt}{said}\n{self.test}\ncheck({self.entry_point})\n"
        return {"pass@1": float(passes(program))}


class _Request(msgspec.Struct):
    context: str
    continuation: str


class Lambada(msgspec.Struct):
    """A line of LAMBADA: its text, or a request with its context and last word."""

    text: str = ""
    request: _Request | None = None

    def item(self) -> Item:
        """Return the text, whose last word is guessed."""
        if self.request is not None:
            return Target(self.request.context, self.request.continuation)
        before, _, word = self.text.rpartition(" ")
        return Target(before, f" {word}")


class Task(NamedTuple):
    """A known task: its lines, how many examples it has, and what is said of a subject."""

    line: type[_Line]
    shots: int = 0
    about: str = ""
    runs_code: bool = False
    generates: bool = False


_MMLU = "The following are multiple choice questions (with answers) about {}.\n\n"
TASKS = {
    "mmlu": Task(Mmlu, about=_MMLU),
    "hellaswag": Task(HellaSwag),
    "arc_challenge": Task(Arc),
    "gsm8k": Task(Gsm8k, shots=5, generates=True),
    "humaneval": Task(HumanEval, runs_code=True, generates=True),
    "lambada": Task(Lambada),
}


class Prompted(NamedTuple):
    """The items of a task; `facts` go to result lines."""

    items: Sequence[Item | Asked]
    facts: dict[str, Any]
    generates: bool = False


def read_task(
    task: Path, data: Path | None, shots: int | None, limit: int | None, run_code: bool
) -> Prompted:
    """Return the items of a known task or of a task file. Raises ModelError, UsageError."""
    known = TASKS.get(str(task))
    if known is None or (data is None and task.exists()):
        return Prompted(likelihood.read_task(task)[:limit], {})
    if data is None:
        raise UsageError(f"--task {task}: give --data, the file or directory with its lines")
    if known.runs_code and not run_code:
        raise UsageError(
            f"--task {task} runs programs that the model writes, as you, in a process of its own "
            "with limits but no sandbox; give --run-code if you want that"
        )
    name = str(task)
    path = data if data.is_file() else _found(name, data, ("test", "val", "validation", ""))
    count = known.shots if shots is None else shots
    examples = _found(name, path.parent, ("dev", "train")) if count else None
    by_subject: dict[str, list[Item | Asked]] = {}
    for line in _lines(examples, known.line) if examples else ():
        by_subject.setdefault(getattr(line, "subject", ""), []).append(line.item())
    items = []
    for line in _lines(path, known.line)[:limit]:
        subject = getattr(line, "subject", "")
        own = by_subject.get(subject, [])[:count]
        if len(own) < count:
            raise UsageError(
                f"{examples}: {len(own)} lines of {subject or name}; expected {count}: give --shots"
            )
        before = known.about.format(subject.replace("_", " ")) if subject else ""
        items.append(_after(before + "".join(f"{_shown(each)}\n\n" for each in own), line.item()))
    facts = {"data": str(path), "shots": count, "shots_from": str(examples) if examples else None}
    return Prompted(items, facts, known.generates)


class Kept:
    """Results of items in a file, by what was asked and under which settings."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read the file; a line that was not finished is cut off. Raises FormatError."""
        self._path, self._settings = path, json.dumps(settings, sort_keys=True)
        self._found: dict[str, Any] = {}
        if path is not None and path.exists():
            data = read_bytes(path, MOST_BYTES)
            os.truncate(path, data.rfind(b"\n") + 1)
            for number, text in enumerate(data.split(b"\n")[:-1], start=1):
                line = parse_object(text, f"{path}:{number}")
                if line.keys() != {"item", "found"}:
                    raise FormatError(f"{path}:{number}: not a line of --keep; give another file")
                self._found[line["item"]] = line["found"]

    def add(self, item: Item | Asked, found: Any) -> None:
        """Keep the result of an item."""
        key = self._key(item)
        self._found[key] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"item": key, "found": found}) + "\n")

    def get(self, item: Item | Asked) -> Any:
        """Return the result of an item, None if it is not there."""
        return self._found.get(self._key(item))

    def _key(self, item: Item | Asked) -> str:
        asked = item[:3] if isinstance(item, Asked) else item
        return sha256(f"{self._settings} {asked!r}".encode()).hexdigest()[:32]


def run_task(
    task: Prompted, session: Session, tokenizer: Tokenizer, kept: Kept, progress: Progress
) -> dict[str, Any]:
    """Score the items that are not kept, and return the metrics of all. Raises ClocherError."""
    scorer, items = Scorer(session, tokenizer), task.items
    missing = [item for item in items if kept.get(item) is None]
    size = _BATCHES * session.config.batch
    for first in range(0, len(missing), size):
        part = missing[first : first + size]
        begun = len(items) - len(missing) + first

        def tell(done: int, total: int, begun: int = begun, count: int = len(part)) -> None:
            progress(begun + done * count // total, len(items))

        if task.generates:
            found: Sequence[Any] = _judged(part, session, tokenizer, tell)
        else:
            found = likelihood.score_items(scorer, part, tell)
        for item, each in zip(part, found, strict=True):
            kept.add(item, each)
    all_found = [kept.get(item) for item in items]
    if task.generates:
        return {"generated": means({n: [each[n] for each in all_found] for n in all_found[0]})}
    scores = [[Likelihood(*pair) for pair in each] for each in all_found]
    return likelihood.metrics(scorer, items, scores)


def _judged(
    items: Sequence[Asked], session: Session, tokenizer: Tokenizer, progress: Progress
) -> list[dict[str, float]]:
    """Return the metrics of greedy completions; prompts that are too long lose their beginning."""
    asked = []
    for item in items:
        room = max(1, session.longest - item.max_new)
        options = {"max_new": item.max_new, "stop": list(item.stop), "temperature": 0}
        asked.append((tokenizer.encode_prompt(item.prompt)[-room:], options))
    model = LanguageModel(session.model, session, tokenizer)
    texts = [each.text for each in model.complete_each(asked, progress)]
    return [item.judge(text) for item, text in zip(items, texts, strict=True)]


def _found(name: str, directory: Path, splits: Sequence[str]) -> Path:
    paths = sorted(directory.rglob("*.jsonl")) + sorted(directory.rglob("*.jsonl.gz"))
    for split in splits:
        for path in paths:
            stem, _, folders = path.name.partition(".")[0], 0, path.relative_to(directory).parts
            if stem == f"{name}_{split}".rstrip("_") or (not split and name in folders):
                return path
    wanted = " or ".join(f"{name}_{split}.jsonl".replace("_.", ".") for split in splits)
    raise ModelNotFound(f"{directory}: no {wanted} there, which --task {name} needs")


def _lines(path: Path, kind: type[_Line]) -> list[Any]:
    data = read_bytes(path, MOST_BYTES)
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise FormatError(f"{path}: not a gzip file: {error}") from None
    found = []
    for number, text in enumerate(data.splitlines(), start=1):
        if text.strip():
            where = f"{path}:{number}"
            line = read_as(parse_object(text, where), kind, where)
            try:
                item = line.item()
                good = not isinstance(item, Question) or 0 <= item.answer < len(item.choices)
            except ValueError:
                good = False
            if not good:
                raise FormatError(f"{where}: the answer is none of the choices")
            found.append(line)
    return found


def _shown(item: Item | Asked) -> str:
    if isinstance(item, Asked):
        return item.prompt + item.shown
    assert isinstance(item, Question)
    return item.context + item.delimiter + item.choices[item.answer]


def _after(before: str, item: Item | Asked) -> Item | Asked:
    if isinstance(item, Asked):
        return item._replace(prompt=before + item.prompt)
    return msgspec.structs.replace(item, context=before + item.context) if before else item


def _without_marks(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _number(text: str) -> str:
    return re.sub(r"\.$", "", _IGNORED.sub("", text)).lower()
