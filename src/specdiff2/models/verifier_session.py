"""One prompt being decoded by a HF verifier: prefill, score trees in one forward, keep the accepted path.

Slots of the cache and positions of the text are the same numbers: committed token i has its keys at slot i. The last
committed token (the root of the next tree) is not cached yet; a round writes the whole tree at slots
``num_committed - 1 ..`` and ``commit`` keeps those of the accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.functional.attention_masks import tree_attention_mask
from specdiff2.models.kv_cache import PreallocatedCache
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
        self._hidden: Tensor | None = None
        capacity = len(prompt) + max_new_tokens + TREE_HEADROOM
        self.cache = PreallocatedCache.allocate(verifier.config, 1, capacity, verifier.dtype, verifier.device)
        if len(prompt) > 1:
            ids = torch.tensor([self._tokens[:-1]], device=verifier.device)
            verifier.forward(ids, cache=self.cache, logits_to_keep=1)

    @property
    def num_committed(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """Committed tokens, prompt included (a copy)."""
        return list(self._tokens)

    @torch.inference_mode()
    def score(self, tree: TokenTree) -> Float[Tensor, "node vocab"]:
        """Logits after each node, in one forward pass, on the verifier's device and in its dtype.

        Raises:
            ValueError: the root of the tree is not the last committed token.
        """
        if tree.tokens[0] != self._tokens[-1]:
            raise ValueError(f"tree root is {tree.tokens[0]}: expected {self._tokens[-1]}, the last committed token")
        num_cached, num_nodes = len(self._tokens) - 1, tree.num_nodes
        self.cache.truncate(num_cached)  # drops the nodes of an earlier score() that was never committed
        self.cache.reserve(num_cached + num_nodes)
        device = self._verifier.device
        ids = torch.tensor([tree.tokens], device=device)
        if num_nodes == 1:  # plain step: one query sees everything, no mask needed
            mask, positions = None, torch.full((1, 1), num_cached, device=device)
        else:
            mask = tree_attention_mask(tree, num_cached, self._verifier.dtype, device)
            positions = torch.tensor([[num_cached + depth for depth in tree.depths()]], device=device)
        self._tree = tree
        logits, self._hidden = self._verifier.forward(ids, cache=self.cache, mask=mask, positions=positions)
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
        root_slot = len(self._tokens) - 1
        self.cache.gather(root_slot, [root_slot, *(root_slot + node for node in path)])
        self._tokens.extend(tree.tokens[node] for node in path)
        self._tokens.append(next_token)
        self._tree = None

    def features(self, path: Sequence[int]) -> Float[Tensor, "token hidden"] | None:
        """Last hidden states (after the final norm) of the root and ``path`` from the latest ``score``."""
        if self._hidden is None:
            return None
        return self._hidden[0, [0, *path]]
