"""Long texts are the same with guesses and without: alone, side by side, held to a structure, and
where the cache is short. Ten thousand tokens of each kind with `-m slow`, some hundred without.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from sessions import make_session
from test_session import MODELS, model_of

from clocher_runtime.engine.arguments import Constraint, Sampling
from clocher_runtime.engine.session import Session
from clocher_runtime.speculation.gate import ForwardCosts
from clocher_runtime.text.grammar import GrammarMaker
from clocher_runtime.text.tokenizer import Tokenizer

CODE = (Path(__file__).parent / "data" / "valid.txt").read_text(encoding="utf-8")
SAMPLINGS = {"greedy": Sampling(), "T=1": Sampling(temperature=1.0, seed=11)}
SIDE_BY_SIDE = 8
PROMPT = 100
Kind = tuple[str, bool]
"""A sampling, and whether a structure is wanted."""
KINDS: list[Kind] = [
    (sampling, structured) for sampling in SAMPLINGS for structured in (False, True)
]
LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["first", "second"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
    "minItems": 200,
}


class Always(ForwardCosts):
    """The larger a pass is the faster it is, so everything that is guessed is sent."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.ns = [1 / (1 + size) for size in range(most + 1)]

    def note(self, tokens: int, ns: int) -> float:
        """Learn nothing."""
        return ns

    def doubt(self, base: int) -> None:
        """Doubt nothing."""


@cache
def prompts_of(name: str) -> tuple[tuple[int, ...], ...]:
    source = model_of(name).checkpoint
    ids = Tokenizer(source.tokenizer_source, source.tokenizer_config).encode(CODE[:20_000])
    return tuple(tuple(ids[PROMPT * i : PROMPT * (i + 1)]) for i in range(SIDE_BY_SIDE))


@cache
def maker_of(name: str) -> GrammarMaker:
    spec = model_of(name).spec
    source = model_of(name).checkpoint.tokenizer_source
    return GrammarMaker(source, spec.vocab_size, sorted(spec.eos_ids))


def constraints_of(name: str, structured: bool) -> list[Constraint] | None:
    if not structured:
        return None
    wish = {"kind": "json_schema", "value": LIST}
    maker_of(name).check(wish)
    return [maker_of(name).compile(wish) for _ in range(SIDE_BY_SIDE)]


def texts_of(session: Session, name: str, kind: Kind, new: int) -> list[list[int]]:
    sampling, structured = kind
    texts: list[list[int]] = [[] for _ in range(SIDE_BY_SIDE)]
    made = session.generate(
        prompts_of(name),
        new,
        SAMPLINGS[sampling],
        None if structured else frozenset(),
        constraints=constraints_of(name, structured),
    )
    for token in made:
        texts[token.sequence].append(token.id)
    return texts


def session_of(name: str, new: int, batch: int, **more: object) -> Session:
    return make_session(
        model_of(name), batch=batch, context=PROMPT + new, prefix_cache=True, **more
    )


@cache
def expected(name: str, new: int) -> dict[Kind, list[list[int]]]:
    """Return what is made without guesses."""
    with closing(session_of(name, new, SIDE_BY_SIDE)) as session:
        return {kind: texts_of(session, name, kind, new) for kind in KINDS}


@pytest.mark.parametrize(
    "new",
    [
        pytest.param(40, id="short"),
        pytest.param(1250, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("batch", [1, SIDE_BY_SIDE])
@pytest.mark.parametrize("always", [False, True], ids=["auto", "always"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(3)
def test_guesses_change_no_long_text(
    name: str, always: bool, batch: int, new: int, record_property: Callable[[str, object], None]
) -> None:
    truth = expected(name, new)
    pages = 3 * -(-(PROMPT + new) // 64)  # of three texts of eight
    short = always and batch > 1
    more = {"speculate": "auto", "kv_pages": pages if short else None}
    with closing(session_of(name, new, batch, **more)) as session:
        speculator = session.scheduler.forwards.speculator
        assert speculator is not None
        if always:
            speculator.costs = Always(session.executor.plan.rows)
        else:
            session.warm()
        for kind in KINDS:
            before = replace(speculator.counts)
            assert sum(map(len, truth[kind])) == SIDE_BY_SIDE * new
            assert texts_of(session, name, kind, new) == truth[kind]
            drafted = speculator.counts.drafted - before.drafted
            accepted = speculator.counts.accepted - before.accepted
            assert 0 <= accepted <= drafted
            assert drafted > 0 or not always
            record_property(str(kind), f"{SIDE_BY_SIDE * new} tokens, {accepted} of {drafted}")
        assert (session.scheduler.preempted > 0) == short
