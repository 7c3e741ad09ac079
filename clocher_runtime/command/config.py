"""A run, fully decided."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Given(NamedTuple):
    """How a field was set: the flag or variable, and the text it was given."""

    source: str
    raw: str

    def __str__(self) -> str:
        return f"{self.source}={self.raw}"


class GivenInFile(Given):
    """The same of a file: its source is the file and the key."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Every setting that a run acts on. `settings.SETTINGS` says how each is given.

    Attributes:
        precision: None keeps weights as stored.
        context: None leaves it to the session.
        threads: None leaves it to `topology.default_threads`.
        isa: None takes the best of the host. The CPU back end reads its variable itself.
        tile_table: None leaves tiles to the shipped tables. The CUDA back end reads its variable
            itself.
        kv_dtype: None takes the back end's: f16 on the CPU, bf16 on a GPU.
        act_prec: None takes the back end's, or the model's if it quantises its activations.
        pretranspose: None packs what has a packed form, and copies nothing.
        config: the file whose settings are in here already.
        dedup: None uses deduplicated weights only where there is no model.ie.bin.
        given: field -> how it was set; fields with their default are absent.
        hints_ignored: "source=value" of what was given and this version does not act on.
    """

    model_dir: Path | None = None
    model_json: Path | None = None
    model_bin: Path | None = None
    require_model: bool = False
    stub: bool = False
    precision: str | None = None
    kv_dtype: str | None = None
    context: int | None = None

    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompts_file: Path | None = None

    max_new: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    device: str = "auto"
    isa: str | None = None
    threads: int | None = None
    tile_table: Path | None = None
    tune: bool = False
    config: Path | None = None
    batch: int = 1
    rounds: int = 1
    warmup: int = 0
    prefetch: int | str = "auto"
    aggregate: bool = False
    outputs: Path | None = None
    trace_ids: Path | None = None
    trace_topk: int = 0

    bytes_per_token: int = 0
    stride_bytes: int = 256
    verify_touch: bool = False
    verify_weights: bool = False
    act_prec: str | None = None
    pretranspose: str | None = None
    affinity: str = "auto"
    use_affinity: bool = False
    numa_policy: str = "auto"
    hot_replicate: bool = False
    hot_repl_limit_mb: int = 0
    prefetch_distance: int | str = "auto"
    stream_block_bytes: int | None = None
    dedup: bool | None = None
    dedup_strict: bool = False
    dedup_policy: str = "on_demand"
    dedup_cache_mb: int | None = None
    dedup_hot_bytes: int = 0
    dedup_hot_list: str | None = None

    given: Mapping[str, Given] = field(default_factory=dict)
    hints_ignored: tuple[str, ...] = ()
