"""LoRA adapters beside their base: sequences of one batch that each name one, or none.

What a sequence must get is what the model gives into whose weights its adapter was merged
(test_lora compares that with peft's arithmetic), with any other requests in its steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from commands import here
from random_models import make, prompt_of
from serving import Served, serving
from sessions import make_session
from test_cuda_models import interpreted
from test_lora import HIDDEN, INNER, VOCAB, Adapter, drawn, halves, write_adapter, write_base
from weight_files import LLAMA

import clocher_runtime
from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_kernels.plan import Plan
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.hf.lora import Adapters, with_lora
from clocher_runtime.config.commands import RunConfig, ServeConfig, settle
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session

SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (32, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NAMES = ("", "sql", "chat")
EXACT = {"act_prec": "fp32", "kv_dtype": "f32", "context": 256}
PROMPTS = [prompt_of(f"prompt {i}", VOCAB, 5 + 7 * i) for i in range(6)]
WHICH = ["", "sql", "chat", "sql", "", "chat"]


def all_linears(shapes: dict[str, tuple[int, int]] = SHAPES, layers: int = 2) -> Adapter:
    tensors: Adapter = {}
    for layer in range(layers):
        for name, shape in shapes.items():
            tensors |= halves(f"model.layers.{layer}.{name}", shape)
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of a base ("") and of two adapters, of other ranks and linears."""
    root = tmp_path_factory.mktemp("lora")
    some = {n: s for n, s in SHAPES.items() if n not in ("self_attn.v_proj", "mlp.up_proj")}
    other = {
        name: drawn(f"other {name}", *((3, t.shape[1]) if "lora_A" in name else (t.shape[0], 3)))
        for name, t in all_linears(some, 1).items()
    }
    return {
        "": write_base(root / "base"),
        "sql": write_adapter(root / "sql", all_linears()),
        "chat": write_adapter(root / "chat", other, use_rslora=True, lora_alpha=4),
    }


def adapters(folders: dict[str, Path], model: Model) -> Adapters:
    named = {name: path for name, path in folders.items() if name}
    return Adapters(model.checkpoint, model.spec, named)


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> Model:
    base = load_model(open_checkpoint(folders[""]))
    return replace(base, adapters=adapters(folders, base))


@pytest.fixture(scope="module")
def merged(folders: dict[str, Path]) -> dict[str, Model]:
    """Return the base, and the base into which each adapter is merged."""
    found = {"": load_model(open_checkpoint(folders[""]))}
    for name in NAMES[1:]:
        found[name] = load_model(with_lora(open_checkpoint(folders[""]), folders[name]))
    return found


def texts(
    session: Session, which: Sequence[str], sampling: Sampling | None = None, n: int = 48
) -> list[list[int]]:
    """Return what prompts become side by side, each with its adapter."""
    begun = [
        session.generate([ids], n, sampling, stop_ids=frozenset(), adapter=name)
        for ids, name in zip(PROMPTS, which, strict=True)
    ]
    for each in begun:
        each.begin()
    return [[token.id for token in each] for each in begun]


def expected(merged: dict[str, Model], sampling: Sampling | None = None) -> list[list[int]]:
    """Return what the merged models make of the prompts."""
    found = {}
    for name, model in merged.items():
        with closing(make_session(model, batch=6, **EXACT)) as session:
            found[name] = texts(session, [""] * 6, sampling)
    assert found[""] != found["sql"] != found["chat"] != found[""]
    return [found[name][i] for i, name in enumerate(WHICH)]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"batch": 6},
    "one at a time": {"batch": 1},
    "short pieces, drafts": {"batch": 6, "chunk": 16, "speculate": "suffix", "threads": 2},
    "preempted": {"batch": 6, "kv_pages": 4},
    "reference": {"batch": 6, "backend": "reference"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_sequence_gets_what_its_merged_model_gives(
    settings: dict[str, Any], model: Model, merged: dict[str, Model]
) -> None:
    with closing(make_session(model, **EXACT, **settings)) as session:
        assert texts(session, WHICH) == expected(merged)
        assert bool(session.scheduler.preempted) == ("kv_pages" in settings)


def test_drawn_tokens_follow_too(model: Model, merged: dict[str, Model]) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.5)
    with closing(make_session(model, batch=6, **EXACT)) as session:
        assert texts(session, WHICH, sampling) == expected(merged, sampling)


def test_a_draft_model_of_the_base_changes_no_token(model: Model, merged: dict[str, Model]) -> None:
    more = {"speculate": "draft", "draft": merged[""], "itl_ms": 60_000}
    with closing(make_session(model, batch=6, **EXACT, **more)) as session:
        assert texts(session, WHICH) == expected(merged)


@pytest.mark.parametrize("precision", ["int4w", "int8w", "bf16"])
def test_a_quantised_base_keeps_its_ids_and_neighbours_change_none(
    precision: str, folders: dict[str, Path]
) -> None:
    base = load_model(open_checkpoint(folders[""]), precision)
    model = replace(base, adapters=adapters(folders, base))
    with closing(make_session(base, batch=6, context=256)) as session:
        plain = texts(session, [""] * 6)
    with closing(make_session(model, batch=6, context=256)) as session:
        together = texts(session, WHICH)
        assert texts(session, [""] * 6) == plain
    with closing(make_session(model, batch=1, context=256)) as session:
        assert texts(session, WHICH) == together
    changed = [one != other for one, other in zip(together, plain, strict=True)]
    assert changed == [bool(name) for name in WHICH]


def test_cached_pages_are_not_shared_between_adapters(
    model: Model, merged: dict[str, Model]
) -> None:
    ids = prompt_of("long", VOCAB, 150)

    def first(session: Session, name: str = "") -> tuple[list[int], int]:
        tokens = list(session.generate([ids], 8, stop_ids=frozenset(), adapter=name))
        return [token.id for token in tokens], tokens[0].cached

    known = {}
    for name, each in merged.items():
        with closing(make_session(each, **EXACT)) as session:
            known[name] = first(session)[0]
    with closing(make_session(model, prefix_cache=True, kv_pages=12, **EXACT)) as session:
        for name in NAMES:
            assert first(session, name) == (known[name], 0)
        for name in NAMES:
            assert first(session, name) == (known[name], 128)


def test_scores_and_states_are_those_of_the_adapter(model: Model, merged: dict[str, Model]) -> None:
    def found(session: Session, name: str) -> list[np.ndarray]:
        rows: list[np.ndarray] = []
        take = lambda _, row: rows.append(row.copy())  # noqa: E731
        for each in (
            session.scoring(PROMPTS[3], take, name),
            session.states(PROMPTS[3], take, adapter=name),
        ):
            assert not list(each)
        return rows

    with closing(make_session(model, score_rows=8, **EXACT)) as session:
        got = {name: found(session, name) for name in NAMES}
    for name, each in merged.items():
        with closing(make_session(each, score_rows=8, **EXACT)) as session:
            for one, other in zip(got[name], found(session, ""), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("diffusion", ["lossless", "threshold:0.9", "off"])
def test_blocks_are_denoised_with_the_adapter_too(diffusion: str, tmp_path: Path) -> None:
    folder = Path(__file__).parent / "data/clocher-tiny-blocks"
    tensors: Adapter = {}
    base = load_model(open_checkpoint(folder), "fp32")
    for name, tensor in base.weights.items():
        if name.endswith(("v_proj.weight", "gate_proj.weight")):
            tensors |= halves(name.removesuffix(".weight"), tensor.shape)
    adapter = write_adapter(tmp_path / "lora", tensors)
    named = replace(base, adapters=adapters({"sql": adapter}, base))

    def made(model: Model, which: Sequence[str]) -> list[list[int]]:
        more = {"batch": 6, "diffusion": diffusion, **EXACT}
        with closing(make_session(model, **more)) as session:
            return texts(session, which)

    bare, adapted = made(base, [""] * 6), made(named, ["sql"] * 6)
    assert all(one != other for one, other in zip(adapted, bare, strict=True))
    mixed = made(named, ["", "sql"] * 3)
    assert mixed[::2] == bare[::2] and mixed[1::2] == adapted[1::2]


def test_without_adapters_a_plan_has_nothing_of_them(
    model: Model, merged: dict[str, Model]
) -> None:
    def plan(model: Model) -> Plan:
        with closing(make_session(model)) as session:
            return session.executor.plan

    bare, full = plan(merged[""]), plan(model)
    assert not {"adapters"} & bare.buffers.keys()
    assert not any("lora." in name for name in (*bare.buffers, *bare.weights))
    # A row of scales for each of 2 combinations of ranks, and x A^T for each of 14 linears.
    assert len(full.calls) - len(bare.calls) == 2 + 14


@pytest.mark.slow
@pytest.mark.parametrize(("activations", "limit"), [("f32", 1e-4), ("f16", 1e-2)])
def test_kernels_for_gpus_give_the_logits_of_the_reference(
    activations: str, limit: float, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"context": 64, "batch": 3, "chunk": 16, "all_logits": True, "kv_dtype": "bf16"}

    def logits(backend: str, **more: Any) -> np.ndarray:
        """Return those of a step in which a prompt stands three times."""
        rows: list[np.ndarray] = []
        take = lambda _, row: rows.append(row.copy())  # noqa: E731
        with closing(make_session(model, backend=backend, **options, **more)) as session:
            scores = [session.scoring(PROMPTS[0], take, name) for name in NAMES]
            for each in scores:
                each.begin()
            assert not session.step() and len(rows) == 3 * len(PROMPTS[0])
        return np.array(rows)

    wanted = logits("reference", act_prec="fp32")
    interpreted(monkeypatch, activations)
    error = logits("cuda") - wanted
    assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < limit


# What is refused.

Q = "model.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[Adapter, dict[str, Any], type[Exception], str]] = {
    "head": (halves("lm_head", (VOCAB, HIDDEN)), {}, UnsupportedModel, "changes lm_head.weight"),
    "embedding": (
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": drawn("ea", 4, VOCAB),
            "base_model.model.model.embed_tokens.lora_embedding_B": drawn("eb", HIDDEN, 4),
        },
        {},
        UnsupportedModel,
        r"changes model.embed_tokens.weight; expected low-rank.*merge it .* --lora /",
    ),
    "modules_to_save": (
        {**halves(Q, (64, 64)), "base_model.model.model.norm.weight": drawn("norm", HIDDEN)},
        {"modules_to_save": ["norm"]},
        UnsupportedModel,
        "changes model.norm.weight",
    ),
    "dora": (halves(Q, (64, 64)), {"use_dora": True}, UnsupportedModel, "use_dora: DoRA"),
    "shape": (halves(Q, (64, 32)), {}, FormatError, r"\[64, 32\], but .* is \[64, 64\]"),
    "layer": (halves("model.layers.9.x_proj", (4, 4)), {}, FormatError, "has no tensor model.lay"),
    "nan": (
        {name: t * np.nan for name, t in halves(Q, (64, 64)).items()},
        {},
        FormatError,
        "a LoRA adapter cannot hold nan",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_chosen_by_name_is_refused(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors, settings, error, message = BAD[case]
    model = load_model(open_checkpoint(folders[""]))
    written = write_adapter(tmp_path / "bad", tensors, **settings)
    with pytest.raises(error, match=message):
        adapters({"good": folders["sql"], "bad": written}, model)


def test_experts_are_refused(tmp_path: Path) -> None:
    make("qwen3_moe", 3, tmp_path / "base")
    base = load_model(open_checkpoint(tmp_path / "base"))
    layer = next(name for name in base.weights if "experts.gate_up" in name).split(".mlp")[0]
    hidden = base.spec.hidden_size
    one = write_adapter(tmp_path / "one", halves(f"{layer}.mlp.experts.0.gate_proj", (8, hidden)))
    router = write_adapter(
        tmp_path / "router", halves(f"{layer}.mlp.router", (base.spec.moe.experts, hidden))
    )
    with pytest.raises(FormatError, match=r"has no tensor .*single experts.*merge_and_unload"):
        adapters({"one": one}, base)
    with pytest.raises(UnsupportedModel, match=r"changes .*router.weight; expected low-rank"):
        adapters({"router": router}, base)


@pytest.mark.parametrize("how", ["by name", "merged"])
def test_rows_that_are_kept_in_another_order_are_refused(how: str, tmp_path: Path) -> None:
    make("deepseek_v3", 3, tmp_path / "base")
    base = load_model(open_checkpoint(tmp_path / "base"))
    name = next(n for n in base.weights if n.endswith(("q_proj.weight", "q_b_proj.weight")))
    shape = base.checkpoint.shape(name)
    adapter = write_adapter(tmp_path / "a", halves(name.removesuffix(".weight"), shape))
    with pytest.raises(FormatError, match="rows in another order"):
        if how == "merged":
            with_lora(base.checkpoint, adapter)
        else:
            adapters({"a": adapter}, base)


# Settings.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", {"": "a"}),
        ("a,b", {"": "a,b"}),
        ("./a=b", {"": "./a=b"}),
        ("owner/name", {"": "owner/name"}),
        ("sql=a", {"sql": "a"}),
        ("sql=a,b=c/d=e", {"sql": "a", "b": "c/d=e"}),
        ("a,sql=b", {"": "a", "sql": "b"}),
        ("sql=", None),
    ],
)
def test_names_and_paths_of_adapters(text: str, found: dict[str, str] | None) -> None:
    if found is None:
        with pytest.raises(UsageError, match=r"^--lora: got '.*', expected a path, or NAME=PATH"):
            settle(ServeConfig, {"lora": text}, {})
        return
    assert settle(ServeConfig, {"lora": text}, {}).lora == found
    if found.keys() == {""}:
        assert settle(RunConfig, {"lora": text}, {}).lora == found
    else:
        with pytest.raises(UsageError, match=r"--lora \w+=...: only clocher serve"):
            settle(RunConfig, {"lora": text}, {})


@pytest.mark.parametrize("words", [("run", "--prompt", "x"), ("bench",)])
def test_only_a_server_has_adapters_by_name(words: tuple[str, ...]) -> None:
    code, _, err = here(*words, "--lora", "sql=a", "--model-dir", str(LLAMA))
    assert code == 2 and "only clocher serve has adapters by name" in err


# The Python API and the server.


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two adapters of the tiny llama that has a tokenizer."""
    root, found = tmp_path_factory.mktemp("llama"), {}
    for name, ending in (("sql", "q_proj.weight"), ("chat", "gate_proj.weight")):
        tensors: Adapter = {}
        for tensor, stored in open_checkpoint(LLAMA).tensors.items():
            if tensor.endswith(ending):
                tensors |= halves(tensor.removesuffix(".weight"), stored.shape)
        found[name] = write_adapter(root / name, tensors, lora_alpha=64)
    return found


@pytest.fixture(scope="module")
def known(of_llama: dict[str, Path]) -> dict[str, str]:
    """Return what the Python API makes of a prompt with each adapter."""
    with clocher_runtime.load(LLAMA, device="cpu", lora=of_llama) as model:
        return {name: model.generate("def f(x):", max_new=8, adapter=name) for name in NAMES}


def test_the_python_api_takes_adapters_by_name(
    of_llama: dict[str, Path], known: dict[str, str]
) -> None:
    assert len({*known.values()}) == 3
    with clocher_runtime.load(LLAMA, device="cpu") as model:
        assert model.generate("def f(x):", max_new=8) == known[""]
        with pytest.raises(UsageError, match=r"adapter: got 'sql', expected one of those loaded"):
            model.generate("def f(x):", adapter="sql")
    with pytest.raises(UsageError, match=r"lora: got .*, expected a path, or NAME=PATH"):
        clocher_runtime.load(LLAMA, lora={"a b": of_llama["sql"]})


@pytest.fixture(scope="module")
def server(of_llama: dict[str, Path]) -> Iterator[Served]:
    flags = [word for name, path in of_llama.items() for word in ("--lora", f"{name}={path}")]
    with serving("--model-dir", LLAMA, "--device", "cpu", *flags) as served:
        yield served


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_server_lists_the_base_and_its_adapters(server: Served, client: openai.OpenAI) -> None:
    base = server.facts["model"]
    listed = {model.id: model for model in client.models.list().data}
    assert [*listed] == [base, "sql", "chat"]
    assert listed[base].parent is None and listed[base].root == base
    assert listed["sql"].parent == base and listed["sql"].root == "sql"
    assert listed["sql"].max_model_len == listed[base].max_model_len
    assert client.models.retrieve("chat") == listed["chat"]
    with pytest.raises(openai.NotFoundError, match=f"this server has {base}, sql, chat"):
        client.models.retrieve("gpt-9")
    told = "LoRA adapter sql, for requests whose model is sql"
    assert sum(told in line for line in server.log) == 1


def test_requests_get_the_adapter_that_their_model_names(
    server: Served, client: openai.OpenAI, known: dict[str, str]
) -> None:
    known = {name or server.facts["model"]: text for name, text in known.items()}
    ask = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0}
    streams = {name: client.completions.create(model=name, stream=True, **ask) for name in known}
    for name, stream in streams.items():
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(c.choices[0].text for c in chunks if c.choices) == known[name]
    choices = client.completions.create(model="sql", n=2, **ask).choices
    assert [choice.text for choice in choices] == [known["sql"]] * 2
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="sq", **ask)


def test_every_api_takes_the_name_of_an_adapter(server: Served, client: openai.OpenAI) -> None:
    base = server.facts["model"]
    talk = [{"role": "user", "content": "def f(x):"}]
    # The tiny llama was never taught to talk: the text is what differs.
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": talk, "max_tokens": 12, "temperature": 0},
        "/v1/responses": {"input": "def f(x):", "max_output_tokens": 12, "temperature": 0},
        "/v1/messages": {"messages": talk, "max_tokens": 12, "temperature": 0},
        "/v1/completions": {"prompt": "def f(x):", "max_tokens": 0, "echo": True, "logprobs": 1},
        "/v1/embeddings": {"input": "def f(x):"},
    }
    for path, body in paths.items():
        answers = {
            name: server.ask(path, model=name, **body).json() for name in (base, "sql", "chat")
        }
        for name, answer in answers.items():
            assert answer["model"] == name, answer
        said = [_said(answer) for answer in answers.values()]
        assert len({*said}) == 3, (path, said)
    for path, body in {
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": {"messages": talk},
    }.items():
        assert server.ask(path, model="sql", **body).status_code == 200
        assert server.ask(path, model="sq", **body).status_code == 404


def _said(answer: dict[str, Any]) -> str:
    kept = ("choices", "output", "content", "data")
    found = next(answer[name] for name in kept if name in answer)
    if "id" in found[0]:
        found = [{**each, "id": ""} for each in found]
    return str(found)


def test_a_name_that_the_model_has_is_refused(of_llama: dict[str, Path]) -> None:
    named = f"sum={of_llama['sql']}"
    code, _, err = here("serve", str(LLAMA), "--served-model-name", "sum", "--lora", named)
    assert code == 2 and "--lora sum=...: the model has that name" in err
    code, _, err = here("serve", str(LLAMA), "--lora", "sql=nowhere")
    assert code == 3 and "--lora: no adapter 'nowhere' here; give the directory of a LoRA" in err


def test_names_of_adapters_differ() -> None:
    with pytest.raises(UsageError, match=r"^--lora: 'sql' names two adapters; give each a name"):
        settle(ServeConfig, {"lora": "sql=a,sql=b"}, {})
