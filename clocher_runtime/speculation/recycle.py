"""Guess what the model itself ranked first the last time that a token stood where the text ends.

A pass computes the logits of every token that it verifies, and of most of them only one id is used.
The first few ids of each are kept by the token that they followed, right guess or wrong, and
guesses walk that table. It looks at one token only, so it guesses where nothing repeats.

Source: Luo et al., Turning Trash into Treasure: Accelerating Inference of Large Language Models
with Token Recycling, 2024. Its tree of 80 nodes is one of 7 here.
"""

from collections.abc import Sequence

import numpy as np

from clocher_runtime.speculation.draft import NO_DRAFT, ROOT, Draft

CANDIDATES = 4
"""Ids that are kept of each token."""
UNKNOWN = -1
CHAIN = 4
"""Nodes of the chain that takes the first id of each token: 0, 1, 2, 3."""
SIBLINGS = ((ROOT, 1), (ROOT, 2), (0, 1))
"""What stands beside it: (parent, rank of the id among those of the parent)."""
PLACES = CHAIN + len(SIBLINGS)
"""Places of the tree. Each is a class of chances."""


class RecycledTokens:
    """The ids that came first after each token, whatever text it stood in.

    Args:
        vocabulary: tokens. The table has 4 bytes for each candidate of each and never grows: 2 MB
            for 4 of each of 128k tokens.
        kept: candidates of a token.
    """

    def __init__(self, vocabulary: int, kept: int = CANDIDATES) -> None:
        self._after = np.full((vocabulary, kept), UNKNOWN, np.int32)

    def learn(self, ids: np.ndarray, candidates: np.ndarray) -> None:
        """Keep what came first after each token; of one that stands there twice the last counts.

        Args:
            ids: [R] i32; what is no token is passed over.
            candidates: [R, K] i32, in descending order; what is no token is not proposed.
        """
        places = ids.view(np.uint32)  # then no negative number is in range
        try:
            self._after[places] = candidates
        except IndexError:  # raised before anything is written
            there = places < len(self._after)
            self._after[places[there]] = candidates[there]

    def propose(self, last: int, most: int) -> tuple[list[int], list[int], list[int]]:
        """Return a tree of what may follow a token: ids, parents and places of its nodes.

        First the chain, then its siblings. A node that is not known is left out.

        Args:
            last: a token.
            most: nodes.
        """
        tokens: list[int] = []
        token = last
        while len(tokens) < min(CHAIN, most):
            token = self._ranked(token, 0)
            if token == UNKNOWN:
                break
            tokens.append(token)
        count = len(tokens)
        parents, places = list(range(-1, count - 1)), list(range(count))
        for place, (parent, rank) in enumerate(SIBLINGS, CHAIN):
            if parent < count < most:
                token = self._ranked(last if parent == ROOT else tokens[parent], rank)
                if token != UNKNOWN:
                    tokens.append(token)
                    parents.append(parent)
                    places.append(place)
        return tokens[:most], parents[:most], places[:most]

    def _ranked(self, token: int, rank: int) -> int:
        """Return one of the ids that came after a token, or `UNKNOWN`."""
        after, count = self._after, len(self._after)
        found: int = after.item(token, rank) if 0 <= token < count else UNKNOWN
        return found if 0 <= found < count else UNKNOWN


class RecycleDrafter:
    """A drafter of a text that walks the table of all texts.

    Args:
        table: of the session.
        kind: the first of its `PLACES` classes.
    """

    def __init__(self, table: RecycledTokens, kind: int) -> None:
        self._table, self._kind = table, kind

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return a tree; see `draft.Drafter`."""
        tokens, parents, places = self._table.propose(ids[-1], most)
        return Draft(tokens, parents, [self._kind + p for p in places]) if tokens else NO_DRAFT
