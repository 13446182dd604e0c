"""One prompt being decoded by a HF verifier: prefill, score trees in one forward, keep the accepted path.

Slots of the cache and positions of the text are the same numbers: committed token i has its keys at slot i. The last
committed token (the root of the next tree) is not cached yet; a round writes the whole tree at slots
``num_committed - 1 ..`` and ``commit`` keeps those of the accepted path. In a batch (``models.verifier_batch``) the
session has a row of a shared cache, and the tree may stand further behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import tree_attention_mask
from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.models.transfer import to_device
from specdiff2.tree import TokenTree

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

TREE_HEADROOM = 128  # slots beyond prompt + max_new_tokens; a larger tree makes the cache grow, once


class HFVerifierSession:
    """See ``protocols.VerifierSession``. Built by ``HFVerifier.start``, which checks the prompt.

    ``cache``: an empty one to use, with eager passes; None makes one.
    """

    @torch.inference_mode()
    def __init__(
        self,
        verifier: HFVerifier,
        prompt: Sequence[int],
        max_new_tokens: int,
        cache: PreallocatedCache | None = None,
    ) -> None:
        self._verifier = verifier
        self._tokens = list(prompt)
        self._tree: TokenTree | None = None
        self._tree_slot = 0  # of the root of the tree
        self._row = 0  # of the pass that scored the tree
        self._hidden: tuple[Tensor, ...] | None = None
        # hidden states by layer with the row and column of the token before the last committed one
        self._anchor: tuple[tuple[Tensor, ...], int, int] | None = None
        self._path: tuple[tuple[int, ...], Tensor] | None = None  # nodes of the accepted path, on the device
        # last hidden states (after the final norm) of the prompt but its last token; None where not kept, or none
        self.prompt_features: Float[Tensor, "token hidden"] | None = None
        self.passes = verifier.passes if cache is None else None
        capacity = len(prompt) + max_new_tokens + TREE_HEADROOM
        if cache is not None:
            self.cache = cache
        elif self.passes is None:
            self.cache = verifier.allocate_cache(1, capacity)
        else:
            self.cache = self.passes.lease(self, capacity)
        if len(prompt) > 1:
            ids = torch.tensor([self._tokens[:-1]], device=verifier.device)
            _, hidden = verifier.forward(ids, cache=self.cache, logits_to_keep=1)
            if hidden is not None:
                self._anchor = hidden, 0, len(prompt) - 2
                self.prompt_features = hidden[-1][0]

    @property
    def verifier(self) -> HFVerifier:
        return self._verifier

    @property
    def num_committed(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """Committed tokens, prompt included (a copy)."""
        return list(self._tokens)

    @property
    def last_token(self) -> int:
        return self._tokens[-1]

    @property
    def cache_dtype(self) -> torch.dtype:
        return self._verifier.dtype

    @torch.inference_mode()
    def score(self, tree: TokenTree) -> Float[Tensor, "node vocab"]:
        """Logits after each node, in one forward pass, on the verifier's device and in its dtype.

        Raises:
            ValueError: the root of the tree is not the last committed token.
        """
        self.check_root(tree)
        num_cached = len(self._tokens) - 1
        self.cache.truncate(num_cached)  # drops the nodes of an earlier score() that was never committed
        if self.passes is not None:
            logits, hidden = self.passes.verify(tree, num_cached, self.cache)
            self.scored(tree, hidden, 0, num_cached)
            return logits
        self.cache.reserve(num_cached + tree.num_nodes)
        positions = [num_cached + depth for depth in tree.depths()]
        numbers = to_device([tree.tokens, tree.parents, positions], self._verifier.device)  # one transfer
        ids, parents, position_ids = numbers.unsqueeze(1)
        # a plain step is one query that sees everything: no mask needed
        mask = None if tree.num_nodes == 1 else tree_attention_mask(parents[0], num_cached, self._verifier.dtype)
        logits, hidden = self._verifier.forward(ids, cache=self.cache, mask=mask, positions=position_ids)
        self.scored(tree, hidden, 0, num_cached)
        return logits[0]

    def check_root(self, tree: TokenTree) -> None:
        """Raises ValueError: the root of the tree is not the last committed token."""
        if tree.tokens[0] != self._tokens[-1]:
            raise ValueError(f"tree root is {tree.tokens[0]}: expected {self._tokens[-1]}, the last committed token")

    def scored(self, tree: TokenTree, hidden: tuple[Tensor, ...] | None, row: int, slot: int) -> None:
        """A pass has scored ``tree``: its hidden states are in this row, its keys and values from this slot on."""
        self._tree, self._path = tree, None
        self._hidden, self._row, self._tree_slot = hidden, row, slot

    @torch.inference_mode()
    def commit(self, path: Sequence[int], next_token: int) -> None:
        """Keep root and ``path`` in the cache; ``next_token`` becomes the next root.

        Raises:
            ValueError: nothing was scored, or ``path`` is not a downward path below the root.
        """
        tree = self._tree
        if tree is None:
            raise ValueError("commit() before score(): there is no tree to keep a path of")
        parent = 0
        for node in path:
            if not 0 < node < tree.num_nodes or tree.parents[node] != parent:
                raise ValueError(f"path {list(path)}: node {node} is not a child of node {parent}")
            parent = node
        if self._hidden is not None:
            self._anchor = self._hidden, self._row, parent
        slot = self._tree_slot
        index = None if self._path is None else self._path_index(path) + slot
        self.cache.gather(len(self._tokens) - 1, [slot, *(slot + node for node in path)], index)
        self._tokens.extend(tree.tokens[node] for node in path)
        self._tokens.append(next_token)
        self._tree = None

    def features(self, path: Sequence[int]) -> Float[Tensor, "token hidden"] | None:
        """Last hidden states (after the final norm) of the root and ``path`` from the latest ``score``."""
        if self._hidden is None:
            return None
        return self._hidden[-1][self._row, self._path_index(path)]

    def _path_index(self, path: Sequence[int]) -> Int[Tensor, " token"]:
        """Root and ``path`` as indices on the device, transferred once a round."""
        if self._path is None or self._path[0] != tuple(path):
            self._path = tuple(path), to_device([0, *path], self._verifier.device)
        return self._path[1]

    def anchor_features(self, layers: Sequence[int]) -> Float[Tensor, " feature_width"] | None:
        """Hidden states of the token right before the last committed one, of the given layers, one after the other.

        None where there is no such token (a prompt of one token). They belong to the committed text: ``score`` alone
        does not change them.

        Raises:
            ValueError: the verifier was not told to keep hidden states (``output_features``).
        """
        if self._anchor is None:
            if len(self._tokens) > 1:
                raise ValueError("anchor_features(): the verifier keeps no hidden states; set output_features=True")
            return None
        hidden, row, column = self._anchor
        return torch.cat([hidden[layer][row, column] for layer in layers])
