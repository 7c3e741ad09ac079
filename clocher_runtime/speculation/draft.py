"""What a drafter proposes: tokens that may come next, as a chain or a tree."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ROOT = -1
"""Parent of the nodes that may follow the last token of the text."""


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        tokens: of each node; a node stands after its parent.
        parents: of each node, `ROOT` for those that may follow the text.
        classes: of each node, what its chance is learnt with (`chances.Chances`).
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    classes: Sequence[int] = ()

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def child(self, node: int, token: int) -> int | None:
        """Return the node that has a token and follows another, or `ROOT`; None if none does."""
        tokens, after = self.tokens, node + 1
        if after < len(tokens) and tokens[after] == token and self.parents[after] == node:
            return after
        for each in range(after, len(tokens)):
            if self.parents[each] == node and self.tokens[each] == token:
                return each
        return None

    def kept(self, nodes: Sequence[int]) -> "Draft":
        """Return the draft of some nodes, ascending, each with its parent among them."""
        if len(nodes) == len(self.tokens):
            return self
        places = {node: place for place, node in enumerate(nodes)} | {ROOT: ROOT}
        return Draft(
            [self.tokens[n] for n in nodes],
            [places[self.parents[n]] for n in nodes],
            [self.classes[n] for n in nodes],
        )

    def depths(self) -> list[int]:
        """Return of each node how many tokens after the text it is, from 1."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    def ancestors(self) -> list[int]:
        """Return of each node the bits of its ancestors and its own: bit i is node i."""
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append(1 << node | (0 if parent == ROOT else found[parent]))
        return found


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Follows one text and guesses how it goes on."""

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return what may come next.

        Args:
            ids: the text so far; between two calls tokens are only added at its end.
            most: nodes.
        """


class Reader(Protocol):
    """What a draft model knows of one text."""

    def behind(self, ids: Sequence[int]) -> int:
        """Take note of the text so far; return what of it is to be read before a guess.

        Returns:
            Tokens, one at least; 0 if the model cannot guess this text.
        """

    def leave(self) -> None:
        """Hold nothing for the text any more; it may go on later."""
