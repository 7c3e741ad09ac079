"""Two Ray actors of one core each beside one: tokens a second, and what memory gives both.

    python -m bench.ray_actors MODEL --kind decode

Actors load the model once, with weights that they share, and wait. Then one of them works alone and
both work together, in turns; each time every actor gets the same rows, so twice the actors do twice
the work. Decoding reads all weights for a token of every row, so what memory gives to two cores
beside one, measured in the same process and the same turns, is its limit; scoring is bound by the
cores. Times are taken by the driver, around calls to actors, so they hold what Ray costs.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from clocher_runtime.engine.probes import MOST_BYTES, read_gbps
from clocher_runtime.ray.actors import Generate, Score
from clocher_runtime.ray.job import connected

TOKENS = 32


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kind", choices=["decode", "score"], default="decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1, help="rows side by side")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a row that is scored")
    args = parser.parse_args()
    with connected() as ray:
        print(json.dumps(measure(ray, args), indent=1))


def measure(ray: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return medians over the rounds, and their ratios."""
    remote = ray.remote(num_cpus=1)(_Worker)
    model = str(Path(args.model).absolute())
    actors = [remote.remote(args.kind, model, args.batch, args.prompt) for _ in range(2)]
    facts = ray.get([actor.about.remote() for actor in actors])
    ray.get([actor.work.remote() for actor in actors])  # warm
    names = ("one", "two", "gbps_one", "gbps_two")
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for count in (1, 2) if turn % 2 else (2, 1):
            name = ("one", "two")[count - 1]
            start = time.perf_counter()
            done = ray.get([actor.work.remote() for actor in actors[:count]])
            samples[name].append(sum(done) / (time.perf_counter() - start))
            # `threads` of this process read as much as the actors did at the same places.
            rate = read_gbps(MOST_BYTES, count)
            samples[f"gbps_{name}"].append(rate or float("nan"))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "kind": args.kind,
        "model": Path(args.model).name,
        "batch": args.batch,
        "tokens_per_s_one": medians["one"],
        "tokens_per_s_two": medians["two"],
        "speedup": medians["two"] / medians["one"],
        "read_gbps_one": medians["gbps_one"],
        "read_gbps_two": medians["gbps_two"],
        "read_speedup": medians["gbps_two"] / medians["gbps_one"],
        "actors": ray.get([actor.about.remote() for actor in actors]) or facts,
        "samples": samples,
    }


class _Worker:
    def __init__(self, kind: str, model: str, batch: int, prompt: int) -> None:
        cls = Generate if kind == "decode" else Score
        options = {"batch": batch, "context": max(512, 2 * prompt)}
        # Every token reads the weights then.
        self._actor = cls(model, **options, **({"speculate": "off"} if kind == "decode" else {}))
        vocabulary = self._actor.model.session.model.spec.vocab_size
        rng = np.random.default_rng(0)
        ids = rng.integers(10, vocabulary - 10, (batch, prompt if kind == "score" else 4))
        if kind == "decode":
            # The first tokens of a row are no end, or rows would have different lengths.
            bias = {int(end): -100.0 for end in self._actor.model.session.model.spec.eos_ids}
            self._rows: list[Any] = [
                {"prompt": row.tolist(), "max_new": TOKENS, "logit_bias": bias} for row in ids
            ]
        else:
            decode = self._actor.model.tokenizer.decode
            self._rows = [{"text": decode(row.tolist())} for row in ids]

    def work(self) -> int:
        """Do the rows, and return their tokens."""
        answers = self._actor.answers(self._rows)
        return sum(len(a["ids"]) if "ids" in a else a["tokens"] for a in answers)

    def about(self) -> dict[str, Any]:
        """Return CPUs and memory in MiB: resident, and its share of what others map as well."""
        fields = dict(
            line.split()[:2]
            for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        )
        names = ("Rss:", "Pss:", "Private_Dirty:", "Shared_Clean:")
        found = {name[:-1].lower(): int(fields[name]) >> 10 for name in names}
        return {"cpus": self._actor.cpus, **found}


if __name__ == "__main__":
    main()
