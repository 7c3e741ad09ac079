"""The first minute: does anything work at all? One kernel of each family, and what joins them.

Kernels, the compiler of Triton's launchers, programmatic launches in a graph, the work-touch, and
the embedded model through `Session`, its logits and tokens on the CPU and on the GPU.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.gpu.parity import Trial
from bench.gpu.products import without_pdl
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting, launch_sum
from bench.gpu.shapes import Matrix
from bench.gpu.weights import random_tensor
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.raw_module import DeviceWorkTouch
from clocher_kernels.cuda.tensors import as_torch
from clocher_kernels.errors import DeviceError
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec

if TYPE_CHECKING:
    from clocher_runtime.engine.load import Model

# Of a product each layout has a kernel of its own, and each range of tokens.
_PRODUCTS = (
    "int4_sym_g64_f16-aligned-m1",
    "mxfp4-aligned-m1",
    "int8_row_bf16-aligned-m1",
    "bf16-aligned-m1",
    "bf16-wide-m37",
    "ternary-aligned-m1-n64-k256-i8",
)
_CHAIN = Matrix("chain", "square", 512, 512, ("int4_sym_g64_f16",))
_LINKS, _REPLAYS = 24, 50
_LOGIT_RMS = 0.02
"""fp16 activations against fp32 ones, relative to the RMS of the logits."""
_PROMPT, _NEW = list(range(40, 60)), 24
_DRY_PROMPT, _DRY_NEW = [40, 41, 42], 2


def items(dry: bool) -> list[Item]:
    """Return the items: those that join things first, they take longest."""
    joined = [
        Item("session", _session),
        Item("pdl-in-a-graph", _pdl),
        Item("launcher", _launcher),
        Item("touch", _touch),
    ]
    kernels = [
        Item(f"{s.name}-{c.id}", partial(_kernel, spec=s, case=c)) for s, c in _family_cases()
    ]
    return [*joined, *(kernels[:2] if dry else kernels)]


def _family_cases() -> Iterator[tuple[OpSpec, Case]]:
    for spec in OPS.values():
        if spec.name != "linear":
            yield spec, spec.cases[0]
            continue
        for start in _PRODUCTS:
            yield spec, next(case for case in spec.cases if case.id.startswith(start))


def _kernel(setting: Setting, spec: OpSpec, case: Case) -> list[Row]:
    act = "f16" if spec.narrow else "f32"
    row: Row = {"op": spec.name, "case": case.id, "act": act}
    return [row | Trial(setting, spec, case, act).check()]


def _launcher(setting: Setting) -> list[Row]:
    """Launch one small kernel of Triton's, and say how long compiling it and its launcher took."""
    x = torch.arange(4096, dtype=torch.int32, device=setting.place)
    y = torch.zeros(1, dtype=torch.int32, device=setting.place)
    began = time.perf_counter()
    launch_sum(x, y, len(x), 256, 1)
    setting.timer.synchronize()
    row: Row = {"first_launch_s": time.perf_counter() - began} if not setting.dry else {}
    good = int(y) == len(x) // 2
    return [row | {"status": "ok"} if good else row | _failed(f"counted {int(y)} odd numbers")]


def _pdl(setting: Setting) -> list[Row]:
    """Replay a chain of products, each of which reads what its predecessor writes."""
    fmt, shape = parse_format(_CHAIN.formats[0]), (_CHAIN.n, _CHAIN.k)
    links, replays = (2, 1) if setting.dry else (_LINKS, _REPLAYS)
    w = random_tensor(fmt, shape, setting)
    first = setting.randn(1, shape[1], dtype=torch.float16)
    steps = [torch.empty_like(first) for _ in range(links)]

    def lowered(device: Setting) -> list[Launch]:
        inputs = [first, *steps]
        return [
            launch
            for x, y in zip(inputs, steps, strict=False)
            for launch in device.lower("linear", x=x, w=w, y=y)
        ]

    plain = without_pdl(setting)
    execute(lowered(plain))
    setting.timer.synchronize()
    expected = [step.clone() for step in steps]
    replay = setting.timer.replay([partial(execute, lowered(setting))])
    for turn in range(replays):
        for step in steps:
            step.fill_(float("nan"))
        replay()
        setting.timer.synchronize()
        for index, (got, want) in enumerate(zip(steps, expected, strict=True)):
            if not torch.equal(got, want):
                return [_failed(f"replay {turn}: product {index} of the chain has other bits")]
    return [{"links": links, "replays": replays, "early_launches": setting.device.pdl}]


def _touch(setting: Setting) -> list[Row]:
    from clocher_runtime.engine.probes import WorkTouch

    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, size, dtype=np.uint8) for size in (100_003, 1, 65_536)]
    host = WorkTouch(parts, 70_001, 256)
    if setting.dry:
        host(3)
        return [{"status": "not measured", "reason": "a dry run has no device memory to touch"}]
    try:
        device = DeviceWorkTouch([as_torch(p, "u8").to(setting.place) for p in parts], 70_001, 256)
    except DeviceError as error:
        return [{"status": "not measured", "reason": str(error)}]
    for tokens in (1, 8, 3):
        device(tokens)
        host(tokens)
        setting.timer.synchronize()
        if (device.tokens, device.checksum) != (host.tokens, host.checksum):
            return [_failed(f"after {host.tokens} tokens the checksum is {device.checksum}")]
    return [{"checksum": host.checksum}]


def _session(setting: Setting) -> list[Row]:
    from clocher_runtime.checkpoints import open_checkpoint  # late: kernels need no runtime
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.engine.load import load_model

    model = load_model(open_checkpoint(embedded_model()))
    # The interpreter would take minutes: a dry run compares the CPU with the references.
    other = "reference" if setting.dry else "cuda"
    cpu, cpu_ids = _run(model, "cpu", setting.dry)
    got, ids = _run(model, other, setting.dry)
    rms = float(np.sqrt(np.mean((got - cpu) ** 2) / np.mean(cpu**2)))
    row: Row = {"rms": rms, "tokens": len(ids), "against": other}
    if not rms <= _LOGIT_RMS:
        return [row | _failed(f"logits differ from the CPU's by {rms:.3g} of their RMS")]
    if ids != cpu_ids:
        return [row | _failed(f"the tokens are {ids}, on the CPU {cpu_ids}")]
    return [row]


def _run(model: "Model", backend: str, dry: bool) -> tuple[np.ndarray, list[int]]:
    """Return logits after each token of the prompt, and the tokens that follow it."""
    from clocher_runtime.config.engine import EngineConfig
    from clocher_runtime.engine.session import Session

    prompt, new = (_DRY_PROMPT, _DRY_NEW) if dry else (_PROMPT, _NEW)
    act = None if backend == "cuda" else "fp32"
    shared = {"backend": backend, "context": 64, "kv_dtype": "bf16", "act_prec": act}
    session = Session(
        model, EngineConfig(chunk=len(prompt), all_logits=True, **shared, speculate="off")
    )  # type: ignore[arg-type]
    try:
        logits = session.logits(prompt)
        tokens = session.generate([prompt], new, stop_ids=frozenset())
        return logits, [token.id for token in tokens]
    finally:
        session.close()


def _failed(reason: str) -> Row:
    return {"status": "failed", "reason": reason}
