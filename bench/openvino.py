"""OpenVINO GenAI as a command that prints llama-bench's JSON.

    python -m bench.openvino -m FILE.gguf -t 2 -n 32

Its pipeline reads GGUF files of Llama and Qwen with Q4_0, Q8_0 and F16 weights.
"""

import json
from pathlib import Path

import click
import numpy as np


@click.command(help=__doc__)
@click.option("-m", "model", type=click.Path(path_type=Path), required=True)
@click.option("-t", "threads", type=click.IntRange(1), required=True)
@click.option("-p", "prompt", type=click.IntRange(0), default=0)
@click.option("-n", "generated", type=click.IntRange(0), default=0)
@click.option("-d", "depth", type=click.IntRange(0), default=0)
@click.option("-r", type=click.Choice(["1"]), default="1", expose_value=False)
@click.option("-o", type=click.Choice(["json"]), default="json", expose_value=False)
def main(model: Path, threads: int, prompt: int, generated: int, depth: int) -> None:
    """Measure one test and print it as llama-bench does."""
    try:
        import openvino_genai as genai
        from openvino import Tensor
    except (ImportError, OSError) as error:
        raise click.ClickException(f"openvino_genai cannot be imported: {error}") from None
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching = False
    schedule.max_num_batched_tokens = max(prompt, depth, 256)
    try:
        pipeline = genai.LLMPipeline(
            str(model), "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=threads
        )
    except (RuntimeError, IndexError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise click.ClickException(f"OpenVINO GenAI cannot load {model.name}: {reason}") from None
    settings = genai.GenerationConfig()
    settings.do_sample, settings.ignore_eos = False, True
    settings.max_new_tokens = settings.min_new_tokens = 1 if prompt else generated + 1
    length = prompt or max(depth, 1)
    # Small ids exist in every vocabulary.
    ids = (np.arange(length, dtype=np.int64) * 31 + 1) % 200
    tokens = genai.TokenizedInputs(Tensor(ids[None]), Tensor(np.ones((1, length), np.int64)))

    def run() -> float:
        metrics = pipeline.generate(tokens, settings).perf_metrics
        if prompt:
            return float(prompt / (metrics.get_ttft().mean / 1e3))
        return float(1e3 / metrics.get_tpot().mean)

    run()
    about = {"build_commit": f"OpenVINO GenAI {genai.__version__}", "model_type": model.stem}
    click.echo(json.dumps([{"avg_ts": run(), **about}]))


if __name__ == "__main__":
    main()
