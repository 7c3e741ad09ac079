"""The CPU executor: bind a Plan once, then execute it in one compiled call per step.

First: which weights of a Plan are packed into tiles, or copied into large pages, before it runs.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.guards import require
from clocher_kernels.ops import OPS, matrices
from clocher_kernels.ops.contract import Value, has_codes
from clocher_kernels.plan import Buffer, Call, Executor, Plan
from clocher_kernels.quant_tensor import LatePlanes, QuantTensor
from cpu_fallback.lanes import jit
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, Progress
from cpu_fallback.ops.bind import BoundCall, Lower
from cpu_fallback.team import large_pages, tape
from cpu_fallback.team.placement import Asked, Hints, call_on, hot_weights, replicate
from cpu_fallback.team.tape import Launch, Stamps, stamp
from cpu_fallback.team.team import Team, aligned
from cpu_fallback.tiles import tile_cache
from cpu_fallback.tiles.tile_pack import is_packed

_CHUNK = 4 << 20
_copies: large_pages.Kept[np.ndarray] = large_pages.Kept()


def waiting(plan: Plan, values: Mapping[str, Value], copied: Set[str]) -> dict[str, int]:
    """Return the bytes of each weight that binding a Plan will pack or copy.

    `values`: every parameter by name; `copied`: weights to copy if they are read in place and lie
    in a mapped file.
    """
    found: dict[str, int] = {}
    for call in plan.calls:
        for name in matrices(call):
            tensor = values[name]
            if not isinstance(tensor, QuantTensor):
                continue  # refused by name when the call is bound
            if has_codes(call):
                found[name] = 0 if is_packed(tensor) else tensor.nbytes
                if call.op == "skip_linear":
                    from cpu_fallback.tiles.columns import are_packed, columns_of

                    found[name] += 0 if are_packed(tensor) else columns_of(tensor).nbytes
            elif isinstance(tensor.planes, LatePlanes) and tensor.planes.are_new:
                found[name] = tensor.nbytes
            elif name == call.args.get("w") and name in copied and reads_in_place(call, tensor):
                planes = tensor.planes.values()
                fresh = [p.nbytes for p in planes if _is_worth_it(p) and id(p) not in _copies]
                found[name] = sum(fresh)
    return found


def reads_in_place(call: Call, tensor: Value) -> bool:
    """Return whether a call multiplies by a weight as it is stored, from wherever it lies."""
    dense = isinstance(tensor, QuantTensor) and not tensor.format.is_sparse
    return dense and not has_codes(call)


def check_memory(packed: int, beside: int) -> None:
    """Raise OutOfMemory unless so many packed bytes fit beside buffers that nothing touched yet."""
    if packed:
        require(
            max(0, packed + beside - large_pages.spare()),
            f"packing weights takes {packed >> 20} MiB beside buffers of {beside >> 20}, together",
            "--pretranspose none reads them from the file, slower",
        )


def in_large_pages(tensor: QuantTensor) -> QuantTensor:
    """Return a tensor whose large planes are copies in large pages, if they lie in a mapped file.

    They are copied once, shared by all Plans, and kept as long as the originals live, whose pages
    are given back.
    """
    copies = {
        name: _copies.of(array, "copy weights", partial(_copy, array))
        for name, array in tensor.planes.items()
        if _is_worth_it(array)
    }
    return replace(tensor, planes={**tensor.planes, **copies})


def _copy(array: np.ndarray) -> np.ndarray:
    made, source = large_pages.allocate(array.nbytes), array.reshape(-1).view(np.uint8)
    pieces = [slice(start, start + _CHUNK) for start in range(0, array.nbytes, _CHUNK)]
    tile_cache.run([partial(made.__setitem__, piece, source[piece]) for piece in pieces])
    large_pages.give_back(array)
    return made.view(array.dtype).reshape(array.shape)


def _is_worth_it(array: np.ndarray) -> bool:
    return array.nbytes >= large_pages.HUGE and large_pages.is_mapped(array)


_MANY_BYTES = 512 << 20
_OPS = {
    "attention": "attention",
    "bsr": "bsr_linear",
    "elementwise": "rms_norm gather_rows hadamard rope join_heads",
    "kv": "kv_append",
    "linear": "linear embed",
    "moe": "route moe_gate_up moe_down",
    "quantize": "quantize fake_quantize drop_small",
    "sampling": "sample advance",
    "selection": "page_bounds select_pages",
    "skip": "skip_linear",
}
LOWER = {
    op: f"cpu_fallback.ops.{module}:LOWER" for module, ops in _OPS.items() for op in ops.split()
}
"""Op name -> the table that has its kernel, or the function from a bound call to its launches; the
table's module is loaded when an op of it is bound."""


class CpuExecutor(Executor):
    """Execute a Plan with compiled kernels on a team of threads.

    A token's result depends neither on the other tokens of the step nor on the number of threads.
    `weights`, QuantTensors and fp32 vectors, are used where they lie and must not change;
    `threads`: the calling one included; `hints` change speed and never results.
    `progress` gets (done, total) while kernels are compiled, `packing` (MiB done, MiB in all) while
    many weights are packed. `beside`: another executor whose team does the work, so that no core
    has two threads of theirs; one of them steps at a time, and this one is closed first. `memory`:
    arrays to use as buffers, by name, at capacity; others are allocated. `stamps`: times of the
    last step, None unless the hints asked for them.

    Raises OutOfMemory; ShapeError for an array that does not fit its op; UnsupportedOp without a
    kernel for an op, or for an op with a format.
    """

    name = "cpu"
    isa = CURRENT.name

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, np.ndarray | QuantTensor],
        threads: int,
        progress: Progress | None = None,
        hints: Hints | None = None,
        packing: Progress | None = None,
        beside: "CpuExecutor | None" = None,
        memory: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.plan = plan
        memory = memory or {}
        threads = beside._team.threads if beside is not None else threads
        self._packing = packing
        hints = hints or Hints()
        self._copied = hints.copied
        self._values: dict[str, Value] = {
            **{n: memory[n] if n in memory else _allocate(b) for n, b in plan.buffers.items()},
            **plan.consts,
            **{name: weights[name] for name in plan.weights},
        }
        self._asked = Asked(hints)
        if hints.placement.effective:
            self._asked.names.add("placement")
        self._copies: list[Mapping[str, Value]] = []
        self._shared = aligned(0)
        self._waiting = self._ready = 0
        try:
            with tile_cache.packing(self._tell):
                bound = self._bind(threads, hints)
                launches = self._launches = next(iter(bound.values()))
                self.stamps = Stamps.table(self._calls, threads) if hints.stamped else None
                jit.warm(_kernels(launches), progress)
        finally:
            large_pages.stop_ahead()
        scratch = max((launch.scratch for launch in launches), default=0)
        tapes = _tapes(bound, threads, hints, self.stamps)
        self._is_guest = beside is not None
        if beside is not None:
            self._team = beside._team
            self._work = self._team.take_on(tapes, scratch)
        else:
            self._team = Team(threads, tapes, scratch, hints)
            self._work = self._team.work

    @property
    def acted_on(self) -> frozenset[str]:
        """Hints that change what happens, by field of `Hints`."""
        return frozenset(self._asked.names)

    def array(self, name: str) -> np.ndarray:
        """Return the live array of a buffer, at capacity."""
        value = self._values[name]
        assert isinstance(value, np.ndarray)
        return value

    def step(self, tokens: int, rows: int) -> None:
        """Execute the Plan for its first tokens and output rows. Raises ShapeError beyond those."""
        if not (0 <= tokens <= self.plan.tokens and 0 <= rows <= self.plan.rows):
            raise ShapeError(
                f"a step of {tokens} tokens and {rows} rows; the Plan has room for "
                f"{self.plan.tokens} and {self.plan.rows}"
            )
        self._team.step(tokens, rows, self._work)

    def walk(self, tokens: int, rows: int) -> Generator[Call, None, None]:
        """Execute a step call by call and yield each that was executed."""
        for index, call in enumerate(self.plan.calls):
            places = [i for i, of in enumerate(self._calls) if of == index]
            words = tape.encode([self._launches[i] for i in places])
            with self._team.running():  # what the caller does between calls has all cores
                self._team.execute(words, tokens, rows, self._work)
            yield call

    def running(self) -> AbstractContextManager[None]:
        """Keep the team awake between steps; a context, entered once per generation."""
        return self._team.running()

    def close(self) -> None:
        """End the team's threads, unless it is another's."""
        if not self._is_guest:
            self._team.close()

    def _share(self, launches: list[Launch]) -> list[Launch]:
        """Give the launches that want it one piece of memory that all threads see."""
        if not self._shared.size:
            self._shared = aligned(max((launch.shared for launch in launches), default=0))
        address = int(self._shared.ctypes.data)
        return [
            replace(launch, fields=(*launch.fields[:-1], address)) if launch.shared else launch
            for launch in launches
        ]

    def _bind(self, threads: int, hints: Hints) -> dict[int, list[Launch]]:
        """Return the launches of each socket, of copies of the hot weights on it if that is wanted.

        A thread of the socket makes the copies and binds them too, since kernels may pack weights.
        """
        homes = hints.placement.homes(threads) if hints.hot_replicate else {}
        several = len(homes) > 1
        names = hot_weights(self.plan, self._values, hints.hot_limit) if several else ()
        if not names:
            return {0: self._share(self._lower(self._values))}
        self._asked.names |= {"hot_replicate", "hot_limit"}

        def bind() -> list[Launch]:
            copies = replicate(self._values, names)
            self._copies.append(copies)
            return self._share(self._lower({**self._values, **copies}))

        return {socket: call_on(cpu, bind) for socket, cpu in homes.items()}

    def _lower(self, values: Mapping[str, Value]) -> list[Launch]:
        values = dict(values)
        for op in sorted({call.op for call in self.plan.calls} - set(LOWER)):
            raise UnsupportedOp(
                f"the CPU back end has no kernel for {op!r}; it has {', '.join(sorted(LOWER))}"
            )
        left = waiting(self.plan, values, self._copied)
        self._waiting, self._ready = sum(left.values()), 0
        check_memory(self._waiting, self.plan.scratch_bytes())
        self._tell(0)
        here = tile_cache.current()
        launches: list[Launch] = []
        self._calls: list[int] = []
        for index, call in enumerate(self.plan.calls):
            weight = call.args.get("w", "")
            if weight in self._copied and reads_in_place(call, values[weight]):
                values[weight] = in_large_pages(values[weight])
            queued = here.queued if here else 0
            bound = BoundCall(OPS[call.op], call, values, self.plan.buffers, self._asked)
            lower: Kernel | Lower = resolve_name(LOWER[call.op])[call.op]
            launches += [bound.launch(lower)] if isinstance(lower, Kernel) else lower(bound)
            self._calls += [index] * (len(launches) - len(self._calls))
            made = sum(left.pop(name, 0) for name in matrices(call))
            self._tell(made - (here.queued - queued if here else 0))
        return launches

    def _tell(self, nbytes: int) -> None:
        """Report that so many more bytes of weights have been packed."""
        self._ready += nbytes
        if self._packing and self._waiting >= _MANY_BYTES:
            self._packing(self._ready >> 20, self._waiting >> 20)


def _tapes(
    bound: Mapping[int, Sequence[Launch]], threads: int, hints: Hints, stamps: Stamps | None
) -> list[np.ndarray]:
    """Return the tape of each thread, from the launches of each socket."""
    stamp = stamps.at if stamps else None
    tapes: dict[int, np.ndarray] = {}
    for socket, launches in bound.items():
        tapes[socket] = tape.encode(launches, next(iter(tapes.values()), None), stamp)
    if len(tapes) == 1:
        return list(tapes.values()) * threads
    return [tapes[hints.placement.socket(rank)] for rank in range(threads)]


def _allocate(buffer: Buffer) -> np.ndarray:
    # A step reads a cache like weights: from end to end. Small pages would cost it a third.
    make = aligned
    if buffer.role == "state" and buffer.nbytes >= large_pages.HUGE:
        # The first token touches all of a small one.
        is_small = buffer.nbytes <= 2 * large_pages.HUGE
        make = large_pages.fetched if is_small else large_pages.allocate
    return make(buffer.nbytes).view(STORAGE[buffer.dtype]).reshape(buffer.shape)


def _kernels(launches: list[Launch]) -> Iterator[Kernel]:
    yield from (tape.lead, tape.serve, stamp)
    for launch in launches:
        yield launch.kernel
        yield from (field for field in launch.fields if isinstance(field, Kernel))
