"""OpenVINO GenAI, measured as llama-bench measures llama.cpp: same arguments, same JSON.

    python -m bench.cases.openvino_genai -m FILE.gguf -t 2 -p 512 -n 0

`python -m bench peers` adds it where the wheel `openvino-genai` is installed. Its pipeline reads
GGUF files of Llama and Qwen with Q4_0, Q8_0 and F16 weights, and repacks them when it starts.
"""

from pathlib import Path

from bench.cases.llama_cpp import bench_command
from bench.ops.experiment import NotMeasured


def _speed(model: Path, threads: int, prompt: int, generated: int, depth: int) -> tuple[float, str]:
    try:
        import numpy as np
        import openvino_genai as genai
        from openvino import Tensor
    except (ImportError, OSError) as error:
        raise NotMeasured(f"openvino_genai cannot be imported: {error}") from None
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching = False
    schedule.max_num_batched_tokens = max(prompt, depth, 256)
    try:
        pipeline = genai.LLMPipeline(
            str(model), "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=threads
        )
    except (RuntimeError, IndexError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise NotMeasured(f"OpenVINO GenAI cannot load {model.name}: {reason}") from None
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
    return run(), f"OpenVINO GenAI {genai.__version__}"


main = bench_command(__doc__, _speed)

if __name__ == "__main__":
    main()
