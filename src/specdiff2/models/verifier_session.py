"""One prompt being decoded by a HF verifier: prefill, score trees in one forward, keep the accepted path.

Slots of the cache and positions of the text are the same numbers: committed token i has its keys at slot i. The last
committed token (the root of the next tree) is not cached yet; a round writes the whole tree at slots
``num_committed - 1 ..`` and ``commit`` keeps those of the accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import tree_attention_mask
from specdiff2.models.transfer import to_device
from specdiff2.tree import TokenTree

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

TREE_HEADROOM = 128  # slots beyond prompt + max_new_tokens; a larger tree makes the cache grow, once


class HFVerifierSession:
    """See ``protocols.VerifierSession``. Built by ``HFVerifier.start``, which checks the prompt."""

    @torch.inference_mode()
    def __init__(self, verifier: HFVerifier, prompt: Sequence[int], max_new_tokens: int) -> None:
        self._verifier = verifier
        self._tokens = list(prompt)
        self._tree: TokenTree | None = None
        self._hidden: tuple[Tensor, ...] | None = None
        self._anchor_hidden: tuple[Tensor, ...] | None = None  # by layer, of the token before the last committed one
        self._path: tuple[tuple[int, ...], Tensor] | None = None  # nodes of the accepted path, on the device
        # last hidden states (after the final norm) of the prompt but its last token; None where not kept, or none
        self.prompt_features: Float[Tensor, "token hidden"] | None = None
        self.passes = verifier.passes
        capacity = len(prompt) + max_new_tokens + TREE_HEADROOM
        if self.passes is None:
            self.cache = verifier.allocate_cache(1, capacity)
        else:
            self.cache = self.passes.lease(self, capacity)
        if len(prompt) > 1:
            ids = torch.tensor([self._tokens[:-1]], device=verifier.device)
            _, hidden = verifier.forward(ids, cache=self.cache, logits_to_keep=1)
            if hidden is not None:
                self._anchor_hidden = tuple(layer[0, -1] for layer in hidden)
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
        if tree.tokens[0] != self._tokens[-1]:
            raise ValueError(f"tree root is {tree.tokens[0]}: expected {self._tokens[-1]}, the last committed token")
        num_cached = len(self._tokens) - 1
        self.cache.truncate(num_cached)  # drops the nodes of an earlier score() that was never committed
        self._tree, self._path = tree, None
        if self.passes is not None:
            logits, self._hidden = self.passes.verify(tree, num_cached, self.cache)
            return logits
        self.cache.reserve(num_cached + tree.num_nodes)
        positions = [num_cached + depth for depth in tree.depths()]
        numbers = to_device([tree.tokens, tree.parents, positions], self._verifier.device)  # one transfer
        ids, parents, position_ids = numbers.unsqueeze(1)
        # a plain step is one query that sees everything: no mask needed
        mask = None if tree.num_nodes == 1 else tree_attention_mask(parents[0], num_cached, self._verifier.dtype)
        logits, self._hidden = self._verifier.forward(ids, cache=self.cache, mask=mask, positions=position_ids)
        return logits[0]

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
            self._anchor_hidden = tuple(layer[0, parent] for layer in self._hidden)
        root_slot = len(self._tokens) - 1
        index = None if self._path is None else self._path_index(path) + root_slot
        self.cache.gather(root_slot, [root_slot, *(root_slot + node for node in path)], index)
        self._tokens.extend(tree.tokens[node] for node in path)
        self._tokens.append(next_token)
        self._tree = None

    def features(self, path: Sequence[int]) -> Float[Tensor, "token hidden"] | None:
        """Last hidden states (after the final norm) of the root and ``path`` from the latest ``score``."""
        if self._hidden is None:
            return None
        return self._hidden[-1][0, self._path_index(path)]

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
        if self._anchor_hidden is None:
            if len(self._tokens) > 1:
                raise ValueError("anchor_features(): the verifier keeps no hidden states; set output_features=True")
            return None
        return torch.cat([self._anchor_hidden[layer] for layer in layers])
