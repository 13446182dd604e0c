"""``runtime.compile=true``: which passes the decoders of a run will need, compiled before anything is timed.

Knows decoders and tree sizes; what is compiled, and how, is the verifier's business (``models.compiled``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.engine import Drafting
from specdiff2.decoding.ensemble import single_drafters
from specdiff2.decoding.prompt_lookup import PromptLookupDrafter
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.models.ar_drafter import ARDrafter
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.compiled import NODE_BUCKETS, find_compiler
from specdiff2.models.dtypes import pick_device
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.verifier_session import TREE_HEADROOM
from specdiff2.protocols import Decoder

log = logging.getLogger(__name__)


def check_compilation(config: Mapping[str, Any]) -> None:
    """Refuse ``runtime.compile=true`` without a C++ compiler before any model loads.

    Raises:
        ConfigError: see ``find_compiler``.
    """
    if config["runtime"]["compile"] and pick_device(config["verifier"].get("device", "auto")).type == "cpu":
        find_compiler()


def tree_sizes(drafting: Drafting) -> tuple[int, int]:
    """Nodes of the smallest and the largest tree of a round in the middle of a text, root included.

    At the end of a text windows are shortened, so trees can be smaller; they are scored as if they were larger.
    """
    if drafting.growth is not None:
        settings = drafting.growth.settings
        return 1 if settings.num_nodes == "auto" else settings.budget + 1, settings.budget + 1
    shortest = 1 if drafting.min_confidence > 0.0 else drafting.gamma  # an unsure drafter shortens its window
    return shortest + 1, drafting.num_drafts * drafting.gamma + 1  # drafts may coincide


def node_counts(low: int, high: int) -> set[int]:
    """Sizes to compile for trees of ``low`` .. ``high`` nodes: the largest exactly, the others by usual buckets."""
    return {high, *(bucket for bucket in NODE_BUCKETS if low <= bucket < high)}


def warm_passes(
    verifier: HFVerifier, decoders: Mapping[str, Decoder], longest_prompt: int, max_new_tokens: int
) -> None:
    """Compile what ``decoders`` will run on prompts of up to ``longest_prompt`` tokens; nothing without ``compile()``.

    What cannot be compiled stays eager, and the log says so.
    """
    if verifier.passes is None:
        return
    counts, drafters = {1}, list[BlockDrafter]()
    for name, decoder in decoders.items():
        if isinstance(decoder, SpeculativeDecoder):
            counts |= node_counts(*tree_sizes(decoder.drafting))
            for drafter in single_drafters(decoder.drafting.drafter):
                if isinstance(drafter, ARDrafter):  # a model of its own, with passes of its own
                    drafter.warm(longest_prompt + max_new_tokens + TREE_HEADROOM)
                elif isinstance(drafter, BlockDrafter) and verifier.passes.can_draft(drafter):
                    drafters.append(drafter)
                elif not isinstance(drafter, PromptLookupDrafter):  # which has no pass at all
                    log.warning("%s: this drafter has no compiled pass and drafts in eager mode", name)
        elif not isinstance(decoder, AutoregressiveDecoder):
            log.warning("%s: runs in eager mode; compare it with others in a run with runtime.compile=false", name)
    before = verifier.passes.num_graphs
    verifier.passes.warm(counts, longest_prompt + max_new_tokens + TREE_HEADROOM, drafters)
    log.info("compiled passes: %d new, %d in all", verifier.passes.num_graphs - before, verifier.passes.num_graphs)
