r"""Clocher as a model of lm-evaluation-harness (`pip install lm_eval`), in this process.

    python -m clocher_runtime.adapters.lm_eval_model --model clocher \
        --model_args pretrained=path/to/model,threads=8,batch=8 --tasks hellaswag

Source: lm-evaluation-harness 0.4, docs/model_guide.md.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from clocher_kernels.errors import UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.text.completion import logprob_of

_MAX_NEW = 256
_UNSAID = "cuda:0"


@register_model("clocher")
class ClocherLM(TemplateLM):  # type: ignore[misc]
    """A loaded model, scored and sampled token by token like any other of the harness.

    Args:
        pretrained: directory or GGUF file of the model.
        batch: texts generated side by side.
        max_gen_toks: tokens of an answer, unless the task says otherwise.
        batch_size: the harness's name of `batch`.
        device: "auto", "cpu" or "cuda". The harness says "cuda:0" where nobody said anything; like
            its own models, this one takes what there is then.
        **session: other arguments of `load`.
    """

    def __init__(
        self,
        pretrained: str,
        batch: int = 1,
        max_gen_toks: int = _MAX_NEW,
        batch_size: int | str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **session: Any,
    ) -> None:
        super().__init__()
        if isinstance(batch_size, int | str) and str(batch_size).isdigit():
            batch = int(batch_size)
        if device in (None, _UNSAID):
            device = "auto"
        session.setdefault("generation_config", "none")  # tasks say how they want to draw
        self.model: LanguageModel = load(
            pretrained, device=device, batch=batch, all_logits=True, **session
        )
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.model.model.spec.eos_ids[0]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's cache of requests."""
        return f"clocher-{self.model.tokenizer.vocab_size}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text; without a word about it, with what the model expects once."""
        if add_special_tokens is None:
            return self.model.tokenizer.encode_prompt(string)
        return self.model.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation."""
        return self.model.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return what the harness keys its cache by: the model has one template or none."""
        return "" if chat_template else None

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        results = []
        for _key, context, continuation in tqdm(requests, "loglikelihood", disable=disable_tqdm):
            results.append(self._score(context, continuation))
        return results

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Return the log probability of a continuation, and whether greedy decoding makes it."""
        longest = self.model.session.context
        if len(continuation) > longest:
            raise UsageError(
                f"a continuation of {len(continuation)} tokens; the context holds {longest}"
            )
        ids = [*context, *continuation][-(longest + 1) :]
        first = len(ids) - 1 - len(continuation)
        total, greedy = 0.0, True

        def take(position: int, logits: np.ndarray) -> None:
            nonlocal total, greedy
            if position < first:
                return
            target = ids[position + 1]
            total += logprob_of(logits, target, 0).logprob
            greedy &= int(logits.argmax()) == target

        self.model.session.score(ids[:-1], take)
        return total, greedy

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of whole texts, window by window."""
        results = []
        for request in tqdm(requests, "rolling", disable=disable_tqdm):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.session.context - 1,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            results.append(sum(self._score(*pair)[0] for pair in pairs))
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return how texts go on until a stop string."""
        texts = []
        session = self.model.session
        size = session.batch
        progress = tqdm(total=len(requests), desc="generate", disable=disable_tqdm)
        for start in range(0, len(requests), size):
            running = []
            for request in requests[start : start + size]:
                context, settings = request.args
                options = _options(settings, self.max_gen_toks)
                room = max(1, session.context - options["max_new"])
                ids = self.tok_encode(context)[-room:]
                running.append(self.model.stream_generate(ids, **options))
            for each in running:
                each.begin()
            texts += [each.result().text for each in running]
            progress.update(len(running))
        progress.close()
        return texts


def _options(settings: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return our names of a task's settings of generation."""
    settings = dict(settings)
    until = settings.pop("until", None)
    options: dict[str, Any] = {"max_new": settings.pop("max_gen_toks", longest)}
    if until:
        options["stop"] = until
    if settings.pop("do_sample", settings.get("temperature", 0) > 0):
        options["temperature"] = settings.pop("temperature", 1.0)
    settings.pop("temperature", None)
    return {**options, **settings}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
