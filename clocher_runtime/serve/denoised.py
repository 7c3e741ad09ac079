"""How the blocks of a request are denoised, and what is refused then before anything is sent."""

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.diffusing import Diffusing, among, of_call
from clocher_runtime.serve.errors import invalid
from clocher_runtime.serve.messages import Ready


def denoised(ready: Ready, asked: str | None) -> Diffusing | None:
    """Return how the blocks of a request are denoised; None: tokens are made one by one.

    Args:
        ready: of the engine.
        asked: the field `diffusion` of the request.

    Raises:
        ApiError: the model, or the session, does not denoise so.
    """
    own = None
    try:
        if ready.blocks is not None:
            own = among(ready.blocks, ready.vocab_size, ready.about["diffusion"])
        return of_call(own, asked)
    except UsageError as error:
        raise invalid(str(error), "diffusion") from None


def check_order(blocks: Diffusing | None) -> None:
    """Check that an answer can be held to a structure.

    Raises:
        ApiError: a rule does not make its tokens in their order.
    """
    if blocks is not None and blocks.rule is not None:
        raise invalid(
            f"diffusion is {blocks.name}, which does not make tokens in their order, so the answer "
            "cannot be held to a structure; use lossless or off where the model has them, or leave "
            "response_format, guided_... and tool_choice out",
            "diffusion",
        )


def check_scores(blocks: Diffusing | None) -> None:
    """Check that the tokens of a prompt have probabilities.

    Raises:
        ApiError: the tokens of the model's blocks see each other.
    """
    if blocks is not None and blocks.blocks.context == "block":
        raise invalid(
            "echo with logprobs: the tokens of this model's blocks see each other, so a prompt has "
            "no likelihood token by token; leave one of them out",
            "echo",
        )
