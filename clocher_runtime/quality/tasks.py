"""Known tasks from local files, as lm-evaluation-harness 0.4 words and measures them.

Source: its lm_eval/tasks/{mmlu/default, hellaswag, arc, gsm8k, humaneval, lambada}. Files are those
of the data sets as JSON lines, `.gz` or not; the examples of a prompt are the first lines of the
file for development or training beside them (for GSM8K the harness draws them).
"""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from clocher_kernels.errors import FormatError, ModelNotFound, UsageError
from clocher_runtime.config.values import shown
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.kept import Kept
from clocher_runtime.disk.strict_json import parse_lines
from clocher_runtime.engine.session import Session
from clocher_runtime.quality import likelihood
from clocher_runtime.quality.likelihood import Progress, Question, Scorer, Target, means
from clocher_runtime.quality.run_program import passes
from clocher_runtime.text.tokenizer import Tokenizer

MOST_BYTES = 1 << 30
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_IGNORED = re.compile(r"(?s)[,$]|.*#### ")
_INVALID = "[invalid]"
_BATCHES = 8
"""How many batches of items are done before they are kept."""

_Line = Mapping[str, Any]


class Asked(msgspec.Struct, frozen=True):
    """A prompt whose greedy completion is judged."""

    context: str
    stop: tuple[str, ...]
    max_new: int
    answer: str
    judge: Callable[[str, str], dict[str, float]]
    """Take completion and answer; return metrics."""


def _mmlu(line: _Line) -> Question:
    choices, answer = line["choices"], line["answer"]
    letters = _LETTERS[: len(choices)]
    lines = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
    asked = "\n".join([line["question"].strip(), *lines, "Answer:"])
    index = letters.index(answer) if isinstance(answer, str) else answer
    return Question(asked, tuple(letters), index, " ")


def _hellaswag(line: _Line) -> Question:
    about = f"{line['activity_label']}: {line['ctx_a']} {line['ctx_b'].capitalize()}"
    endings = tuple(map(_without_marks, line["endings"]))
    return Question(_without_marks(about), endings, int(line["label"]), " ")


def _without_marks(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _arc(line: _Line) -> Question:
    """Return a question: as published, or with `choices`, `labels` and `answer` side by side."""
    choices = line["choices"]
    nested = isinstance(choices, dict)
    texts, labels = (choices["text"], choices["label"]) if nested else (choices, line["labels"])
    answer = labels.index(line["answerKey"] if nested else line["answer"])
    return Question(f"Question: {line['question']}\nAnswer:", tuple(texts), answer, " ")


def _gsm8k(line: _Line) -> Asked:
    stop = ("Question:", "</s>", "<|im_end|>")
    asked = f"Question: {line['question']}\nAnswer:"
    return Asked(asked, stop, 256, f" {line['answer']}", _same_number)


def _same_number(said: str, answer: str) -> dict[str, float]:
    marked, numbers = _MARKED.search(said), _NUMBER.findall(said)
    found = {
        "exact_match_strict": marked[1] if marked else _INVALID,
        "exact_match_flexible": next(filter(None, numbers[-1])) if numbers else _INVALID,
    }
    return {name: float(_number(text) == _number(answer)) for name, text in found.items()}


def _number(text: str) -> str:
    return re.sub(r"\.$", "", _IGNORED.sub("", text)).strip().lower()


def _humaneval(line: _Line) -> Asked:
    stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    test = f"\n{line['test']}\ncheck({line['entry_point']})\n"

    def judge(said: str, answer: str) -> dict[str, float]:
        return {"pass@1": float(passes(line["prompt"] + said + answer))}

    return Asked(line["prompt"], stop, 1024, test, judge)


def _lambada(line: _Line) -> Target:
    """Return what ends with a text's last word; of a request, with its continuation."""
    if "request" in line:
        return Target(line["request"]["context"], line["request"]["continuation"])
    before, _, word = line["text"].rpartition(" ")
    return Target(before, f" {word}")


class Task(NamedTuple):
    """A known task."""

    item: Callable[[_Line], Any]
    fields: str  # of a line, for messages
    shots: int = 0  # examples in a prompt
    about: str = ""  # introduction of a subject, {} for its name
    generates: bool = False
    runs_code: bool = False


_MMLU = "The following are multiple choice questions (with answers) about {}.\n\n"
TASKS = {
    "mmlu": Task(_mmlu, "question, choices, answer (a number from 0, or a letter)", about=_MMLU),
    "hellaswag": Task(_hellaswag, "activity_label, ctx_a, ctx_b, endings, label (a number)"),
    "arc_challenge": Task(_arc, "question, choices (with text and label), answerKey"),
    "gsm8k": Task(_gsm8k, "question, answer", shots=5, generates=True),
    "humaneval": Task(_humaneval, "prompt, test, entry_point", generates=True, runs_code=True),
    "lambada": Task(_lambada, "text"),
}


class Prompted(NamedTuple):
    """The items of a task: `Item`s, or all `Asked`; `facts` go to result lines."""

    items: Sequence[Any]
    facts: dict[str, Any]
    generates: bool = False


def read_task(
    name: str, data: Path | None, shots: int | None, limit: int | None, run_code: bool
) -> Prompted:
    """Return the items of a known task. Raises ModelError, UsageError."""
    if (known := TASKS.get(name)) is None:
        raise UsageError(
            f"--task {name}: expected one of {', '.join(TASKS)}; lm_eval runs other tasks: python "
            "-m clocher_runtime.adapters.lm_eval_model --tasks NAME"
        )
    if data is None:
        raise UsageError(f"--task {name}: give --data, the file or directory with its lines")
    if known.runs_code and not run_code:
        raise UsageError(
            f"--task {name} runs programs that the model writes, as you, in a process of its own "
            "with limits but no sandbox; give --run-code if you want that"
        )
    path = data if data.is_file() else _found(name, data, ("test", "val", "validation", ""))
    count = known.shots if shots is None else shots
    examples = _found(name, path.parent, ("dev", "train")) if count else None
    shown: dict[str, list[str]] = {}
    for subject, item in _lines(examples, name) if examples else ():
        answer = item.answer
        if isinstance(item, Question):
            answer = item.delimiter + item.choices[item.answer]
        shown.setdefault(subject, []).append(f"{item.context}{answer}\n\n")
    items = []
    for subject, item in _lines(path, name)[:limit]:
        own = shown.get(subject, [])[:count]
        if len(own) < count:
            raise UsageError(
                f"{examples}: {len(own)} lines of {subject or name}; expected {count}: give --shots"
            )
        about = known.about.format(subject.replace("_", " ")) if subject else ""
        context = about + "".join(own) + item.context
        items.append(msgspec.structs.replace(item, context=context))
    facts = {"data": str(path), "shots": count, "shots_from": str(examples) if examples else None}
    return Prompted(items, facts, known.generates)


def _found(name: str, directory: Path, splits: Sequence[str]) -> Path:
    """Return the file of the first of some splits; "" stands for none, or any file in `name`/."""
    paths = [*sorted(directory.rglob("*.jsonl")), *sorted(directory.rglob("*.jsonl.gz"))]
    for split in splits:
        for path in paths:
            stem, folders = path.name.partition(".")[0], path.relative_to(directory).parts
            if stem == f"{name}_{split}".rstrip("_") or (not split and name in folders):
                return path
    wanted = " or ".join(f"{name}_{split}.jsonl".replace("_.", ".") for split in splits)
    raise ModelNotFound(f"{directory}: no {wanted} there, which --task {name} needs")


def _lines(path: Path, name: str) -> list[tuple[str, Any]]:
    """Return the subject and the item of each line of a task's file."""
    task = TASKS[name]
    data = read_bytes(path, MOST_BYTES)
    if path.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
                data = stream.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise FormatError(f"{path}: not a gzip file: {error}") from None
        if len(data) > MOST_BYTES:
            raise FormatError(f"{path}: more than {MOST_BYTES} bytes when unpacked; give a part")
    found = []
    for line, where in parse_lines(data, path):
        try:
            item = task.item(line)
            if not isinstance(item, Asked):  # which holds a function
                item = msgspec.convert(msgspec.structs.asdict(item), type(item))
            if isinstance(item, Question) and not 0 <= item.answer < len(item.choices):
                raise ValueError  # the answer is none of the choices
        except (LookupError, TypeError, ValueError, AttributeError):
            raise FormatError(
                f"{where}: not a line of {name}: got {shown(line)}, expected fields "
                f"{task.fields}; give the data set's file with --data"
            ) from None
        found.append((str(line.get("subject", "")), item))
    if not found:
        raise FormatError(f"{path}: it has no lines; give the data set as JSON lines")
    return found


Complete = Callable[[Sequence[tuple[Any, Mapping[str, Any]]], Progress], Sequence[Any]]
"""Take prompts with their options, as `LanguageModel.complete_each`; return what has a `text`."""


def run_task(
    task: Prompted,
    session: Session,
    tokenizer: Tokenizer,
    kept: Kept,
    progress: Progress,
    complete: Complete,
) -> dict[str, Any]:
    """Score the items that are not kept, and return the metrics of all. Raises ClocherError."""
    scorer, items = Scorer(session, tokenizer), task.items
    kind = dict[str, float] if task.generates else list[likelihood.Likelihood]
    missing = [item for item in items if kept.get(_key(item), kind) is None]
    size = _BATCHES * session.config.batch
    for first in range(0, len(missing), size):
        part = missing[first : first + size]
        begun = len(items) - len(missing) + first

        def tell(done: int, total: int, begun: int = begun, count: int = len(part)) -> None:
            progress(begun + done * count // total, len(items))

        if task.generates:
            asked = [_asked(item, session, tokenizer) for item in part]
            said = zip(part, complete(asked, tell), strict=True)
            found: Sequence[Any] = [item.judge(each.text, item.answer) for item, each in said]
        else:
            found = scorer.grouped([*likelihood.pairs_of(scorer, part)], tell)
        for item, each in zip(part, found, strict=True):
            kept.add(_key(item), each)
    every = [kept.get(_key(item), kind) for item in items]
    if task.generates:
        return {"generated": means({name: [each[name] for each in every] for name in every[0]})}
    return likelihood.metrics(items, every)


def truncated(task: Prompted, session: Session, tokenizer: Tokenizer) -> int:
    """Return how many prompts lose their beginning, as the context does not hold them."""
    if task.generates:
        encode = tokenizer.encode_prompt
        return sum(len(encode(item.context)) > _room(item, session) for item in task.items)
    each = likelihood.pairs_of(Scorer(session, tokenizer), task.items)
    return sum(max(len(a) + len(b) for a, b in pairs) > session.longest + 1 for pairs in each)


def _key(item: Any) -> Any:
    """Return what an item asks, which names its result."""
    return (item.context, item.stop, item.answer) if isinstance(item, Asked) else item


def _asked(item: Asked, session: Session, tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
    """Return a prompt, without its beginning if it is too long, and its options."""
    options = {"max_new": item.max_new, "stop": list(item.stop), "temperature": 0}
    return tokenizer.encode_prompt(item.context)[-_room(item, session) :], options


def _room(item: Asked, session: Session) -> int:
    return max(1, session.longest - item.max_new)
