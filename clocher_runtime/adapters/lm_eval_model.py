r"""Clocher as a model of lm-evaluation-harness (`pip install lm_eval`), in this process.

    python -m clocher_runtime.adapters.lm_eval_model --model clocher \
        --model_args pretrained=path/to/model,threads=8 --batch_size 8 --tasks hellaswag

The model is registered when this module is imported; do so before
`lm_eval.simple_evaluate(model="clocher")`. Source: lm-evaluation-harness 0.4, docs/model_guide.md.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ModuleNotFoundError as error:
    needs = f"this adapter needs {error.name}, which is not installed; pip install lm_eval"
    if __name__ == "__main__":
        sys.exit(needs)
    raise ModuleNotFoundError(needs, name=error.name) from error

from clocher_kernels.errors import UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.quality.likelihood import Scorer

_MAX_NEW = 256
_AUTO_BATCH = 8
_UNSAID = "cuda:0"
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("clocher")
class ClocherLM(LM):  # type: ignore[misc]
    """A loaded model for the harness. Raises UsageError, ClocherError.

    `pretrained`: directory, GGUF file or owner/name in the Hub's cache; `batch_size`: "auto" for
    `max_batch_size` or 8; `device`: "auto", "cpu" or "cuda" ("cuda:0", the harness's default, means
    "auto"); `**session`: arguments of `load`.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        max_gen_toks: int = _MAX_NEW,
        device: str | None = None,
        max_batch_size: int | None = None,
        **session: Any,
    ) -> None:
        super().__init__()
        if "batch" in session:
            raise UsageError("batch: the harness calls it batch_size; give that")
        device = "auto" if device in (None, _UNSAID) else device
        session.setdefault("generation_config", "none")  # tasks say how they want to draw
        self.model: LanguageModel = load(
            pretrained,
            device=device,
            batch=_batch(batch_size, max_batch_size),
            all_logits=True,
            **session,
        )
        self.max_gen_toks = max_gen_toks
        self._scorer = Scorer(self.model.session, self.model.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Tokenizer name, for the harness's request cache."""
        return f"clocher-{self.model.tokenizer.vocab_size}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation."""
        return self.model.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the harness's cache key; a model has one template or none."""
        return "" if chat_template else None

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return log probability, and whether greedy decoding yields it, of each continuation."""
        pairs = [[self._scorer.pair(*request.args)] for request in requests]
        with _progress("loglikelihood", disable_tqdm) as progress:
            scores = self._scorer.grouped(pairs, progress)
        found = [(each.logprob, each.is_greedy) for (each,) in scores]
        self._keep("loglikelihood", requests, found)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of whole texts, window by window."""
        windows = [self._scorer.windows(*request.args) for request in requests]
        with _progress("rolling", disable_tqdm) as progress:
            scores = self._scorer.grouped(windows, progress)
        found = [sum((each.logprob for each in of), 0.0) for of in scores]
        self._keep("loglikelihood_rolling", requests, found)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to a stop string."""
        asked = []
        for request in requests:
            context, settings = request.args
            options = _options(settings, self.max_gen_toks)
            room = max(1, self.model.session.longest - options["max_new"])
            asked.append((self.model.tokenizer.encode_prompt(context)[-room:], options))
        with _progress("generate", disable_tqdm) as progress:
            found = [each.text for each in self.model.complete_each(asked, progress)]
        self._keep("generate_until", requests, found)
        return found

    def _keep(self, name: str, requests: Sequence[Any], found: Sequence[Any]) -> None:
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial(name, request.args, result)


def _batch(given: int | str, most: int | None) -> int:
    if given == "auto":
        return most or _AUTO_BATCH
    if str(given).isdigit() and int(given):
        return int(given)
    raise UsageError(f"batch_size is {given!r:.80}; expected a whole number from 1, or 'auto'")


def _options(settings: Mapping[str, Any], longest: int) -> dict[str, Any]:
    settings = dict(settings)
    lengths = [settings.pop(name, None) for name in _LENGTHS]
    until, draws = settings.pop("until", None), settings.pop("do_sample", None)
    temperature = settings.pop("temperature", None)
    options = {"max_new": next((each for each in lengths if each is not None), longest)}
    if until:
        options["stop"] = until
    if draws or (draws is None and temperature):
        options["temperature"] = 1.0 if temperature is None else temperature
    return {**options, **settings}


@contextmanager
def _progress(name: str, disable: bool) -> Iterator[Callable[[int, int], None]]:
    with tqdm(desc=name, disable=disable) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
