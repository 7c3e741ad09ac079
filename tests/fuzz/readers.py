"""Every reader of files: its seeds, how they are changed, and what is done with the result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from clocher_kernels.errors import ModelError, OutOfMemory, UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import JSON_NAME, Checkpoint
from clocher_runtime.checkpoints.dedup.reader import open_deduplicated
from clocher_runtime.checkpoints.gguf.checkpoint import open_gguf
from clocher_runtime.checkpoints.hf.shards import open_safetensors
from clocher_runtime.checkpoints.iebin import open_iebin
from clocher_runtime.checkpoints.q4 import COMPAT_NAME, open_index
from clocher_runtime.convert.q4_entries import read_planes
from clocher_runtime.convert.q4_map import load_q4_map
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import given, parse_object, read_as
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.config import Ends
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.quality.verify import read_trace
from clocher_runtime.text.chat_template import ChatTemplate
from clocher_runtime.text.tokenizer import Tokenizer
from fuzz import hf_seeds, seeds, text_seeds
from fuzz.mutations import (
    Mutation,
    Words,
    mutate_bytes,
    mutate_gguf,
    mutate_json,
    mutate_lines,
    mutate_safetensors,
    mutate_sealed,
    words_of,
)
from fuzz.oracle import Files
from fuzz.text_mutations import mutate_template, mutate_text, mutate_tokenizer
from fuzz.text_seeds import Seed

MAX_DECODED = 1 << 20
"""Elements of a tensor that is decoded too: decoding takes more memory than reading, by design."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader under test.

    Attributes:
        seeds: makes sound files.
        mutations: name of a file (or its suffix) -> how it is changed, and how often.
        read: opens the files in a directory and uses everything in them.
        errors: what it may raise.
    """

    name: str
    seeds: Callable[[], list[Seed]]
    mutations: Mapping[str, tuple[Mutation, int]]
    read: Callable[[Path], None]
    errors: tuple[type[Exception], ...] = (ModelError,)


class Mutator:
    """Makes the mutants of a reader: number `index` of a seed is always the same."""

    def __init__(self, reader: Reader, seed: int) -> None:
        self._name, self._seed = reader.name, seed
        self._originals = reader.seeds()
        self._mutations = reader.mutations
        found: set[str] = set()
        for files in self._originals:
            for name, data in files.items():
                if name.endswith(".json"):
                    found.update(words_of(data))
                elif name.endswith(".safetensors"):
                    length = int.from_bytes(data[:8], "little")
                    found.update(words_of(data[8 : 8 + length]))
        self._words: Words = sorted(found)
        self._choices = [self._weighted(files) for files in self._originals]

    @property
    def originals(self) -> list[Seed]:
        """The sound files."""
        return self._originals

    def mutant(self, index: int) -> Files:
        """Return the files of a mutant."""
        dice = Random(f"{self._seed}:{self._name}:{index}")
        which = dice.randrange(len(self._originals))
        files, choices = dict(self._originals[which]), self._choices[which]
        for _ in range(dice.choice((1, 1, 1, 1, 2))):
            name, mutate = dice.choice(choices)
            if not files.get(name):
                continue
            if dice.random() < 0.01:
                del files[name]
                continue
            # A file that was changed once need not be one that its mutation understands any more.
            fresh = files[name] is self._originals[which][name]
            files[name] = (mutate if fresh else mutate_bytes)(files[name], dice, self._words)
        return files

    def _weighted(self, files: Seed) -> list[tuple[str, Mutation]]:
        found = []
        for name in files:
            for pattern, (mutation, weight) in self._mutations.items():
                if name.endswith(pattern):
                    found += [(name, mutation)] * weight
                    break
        return found


def _use(checkpoint: Checkpoint) -> None:
    """Read every tensor, with all checks; decode those that are small."""
    for name in checkpoint.names:
        tensor = checkpoint.tensor(name, verify=True)
        count = 1
        for dim in tensor.shape:
            count *= dim
        if count <= MAX_DECODED:
            tensor.decode()
    checkpoint.release()


def _read_safetensors(folder: Path) -> None:
    found, _ = open_safetensors(folder / "model.safetensors")
    for each in found.values():
        each.array.tobytes()


def _read_model(folder: Path) -> None:
    """Open and use a directory, then load it as a model where its config says how."""
    checkpoint = open_checkpoint(folder)
    _use(checkpoint)
    model = load_model(checkpoint)
    for weight in model.weights.values():
        assert isinstance(weight, QuantTensor) or weight.size


def _read_tensors(folder: Path) -> None:
    _use(open_checkpoint(folder))


def _read_config(folder: Path) -> None:
    config = parse_object(read_bytes(folder / "config.json", 1 << 24), "config.json")
    spec = spec_from_config(config)
    assert inventory(spec)
    path = folder / "generation_config.json"
    generation = parse_object(read_bytes(path, 1 << 24), path.name)
    read_as(given(generation), Ends, path.name).eos_ids(spec.vocab_size)


def _read_iebin(folder: Path) -> None:
    """Use the tensors without hashes, which would stop most mutants, and then with them."""
    _use(open_iebin(folder / JSON_NAME))
    open_iebin(folder / JSON_NAME, verify=True).release()


def _read_dedup(folder: Path) -> None:
    checkpoint = open_deduplicated(folder)
    for name in checkpoint.names:
        checkpoint.tensor(name)
    open_deduplicated(folder, verify=True)


def _read_gguf(folder: Path) -> None:
    _use(open_gguf(folder / "m.gguf"))


def _read_q4_map(folder: Path) -> None:
    assert load_q4_map(folder / "q4.json").rules


def _read_q4_manifest(folder: Path) -> None:
    q4_map = load_q4_map(folder / "q4.json")
    for entry in (q4_map.entries or {}).values():
        if entry.regions and q4_map.planes:
            path = folder / q4_map.planes.file
            read_planes(path, q4_map.planes.nbytes, entry)


def _read_q4_overlay(folder: Path) -> None:
    _use(open_index(folder / COMPAT_NAME))
    open_index(folder / COMPAT_NAME).verify()


def _read_trace(folder: Path) -> None:
    assert read_trace(folder / "t.jsonl")


def _read_tokenizer(folder: Path) -> None:
    """Tokenise a text, and give back the text of its ids and of others that nobody vouches for."""
    path = folder / "tokenizer_config.json"
    config = parse_object(read_bytes(path, 1 << 24), path.name)
    tokenizer = Tokenizer(folder / "tokenizer.json", config)
    text = read_bytes(folder / "text.txt", 1 << 24)
    ids = tokenizer.encode(text.decode("utf-8", "surrogateescape"), room=1 << 16)
    tokenizer.decode(ids, skip_special=True)
    dice = Random(text)
    drawn = (dice.randrange(tokenizer.vocab_size + 9) for _ in range(4))
    stream = tokenizer.stream()
    for token in (*ids[:8], 99, *drawn):
        stream.push(token)
    stream.flush()


def _read_template(folder: Path) -> None:
    path = folder / "values.json"
    values = parse_object(read_bytes(path, 1 << 24), path.name)
    source = read_bytes(folder / "chat_template.jinja", 1 << 24).decode("utf-8", "replace")
    assert isinstance(ChatTemplate(source).render(**values), str)


_JSON = {".json": (mutate_json, 1)}
_WEIGHTS = {".safetensors": (mutate_safetensors, 1)}

_ALL = (
    Reader("safetensors", hf_seeds.safetensors, _WEIGHTS, _read_safetensors),
    Reader("hf", hf_seeds.hf_quantised, {**_WEIGHTS, **_JSON}, _read_tensors),
    Reader(
        "hf-index",
        hf_seeds.hf_sharded,
        {".index.json": (mutate_json, 4), "config.json": (mutate_json, 1), **_WEIGHTS},
        _read_model,
    ),
    Reader(
        "config",
        hf_seeds.configs,
        {"generation_config.json": (mutate_json, 1), ".json": (mutate_json, 5)},
        _read_config,
    ),
    Reader(
        "iebin",
        seeds.iebin,
        {"model.ie.json": (mutate_sealed, 4), "model.ie.bin": (mutate_bytes, 1)},
        _read_iebin,
    ),
    Reader(
        "block-sparse",
        seeds.block_sparse,
        {"model.ie.json": (mutate_sealed, 2), "model.ie.bin": (mutate_bytes, 2)},
        _read_iebin,
    ),
    Reader(
        "dedup",
        seeds.dedup,
        {
            "model.dedup.json": (mutate_sealed, 4),
            ".bin": (mutate_bytes, 1),
            "model.ie.json": (mutate_sealed, 1),
        },
        _read_dedup,
    ),
    Reader("gguf", seeds.gguf, {".gguf": (mutate_gguf, 1)}, _read_gguf),
    Reader("q4-map", seeds.q4_maps, _JSON, _read_q4_map, (UsageError,)),
    Reader(
        "q4-manifest",
        seeds.q4_manifests,
        {".json": (mutate_json, 3), ".bin": (mutate_bytes, 1)},
        _read_q4_manifest,
        (UsageError, ModelError),
    ),
    Reader(
        "q4-overlay",
        seeds.q4_planes,
        {COMPAT_NAME: (mutate_sealed, 4), ".bin": (mutate_bytes, 1)},
        _read_q4_overlay,
    ),
    Reader("trace", seeds.traces, {".jsonl": (mutate_lines, 1)}, _read_trace, (UsageError,)),
    Reader(
        "tokenizer",
        text_seeds.tokenizers,
        {"tokenizer.json": (mutate_tokenizer, 3), ".txt": (mutate_text, 2), **_JSON},
        _read_tokenizer,
        (ModelError, UsageError, OutOfMemory),
    ),
    Reader(
        "templates",
        text_seeds.templates,
        {".jinja": (mutate_template, 3), **_JSON},
        _read_template,
        (ModelError, UsageError),
    ),
)

READERS: Mapping[str, Reader] = {reader.name: reader for reader in _ALL}
"""By name."""
