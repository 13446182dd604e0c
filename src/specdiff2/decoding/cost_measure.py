"""Measures a cost table: real rounds of a real pair, interleaved over the node counts, medians of the laps.

The rounds are those of decoding (law, tree, scores, probabilities, commit), except that the number of nodes is
prescribed. Node counts take turns, so that a machine that gets slower or faster meanwhile tilts no curve. It
takes a few seconds; nothing is decoded for anyone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import torch

from specdiff2.decoding.cost_table import NODE_COUNTS, CostKey, CostTable
from specdiff2.decoding.engine import start_drafter
from specdiff2.decoding.probs import ProbsBuffer
from specdiff2.decoding.timing import Stopwatch
from specdiff2.decoding.tree_growth import draft_law
from specdiff2.functional.tree_search import best_first
from specdiff2.models.dtypes import describe_cpu
from specdiff2.protocols import Drafter, Verifier
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, SamplingParams

log = logging.getLogger(__name__)
NUM_PROMPT_TOKENS = 128
NUM_WARMUP, NUM_REPEATS = 2, 5


def cost_key(verifier: Verifier, drafter: Drafter, gamma: int) -> CostKey:
    """What a table for this pair, as it runs here and now, is filed under."""
    device = torch.device(getattr(verifier, "device", "cpu"))
    config = getattr(drafter, "config", None)
    shape = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    kind = type(drafter).__name__
    return CostKey(
        machine=machine_name(device),
        verifier=str(getattr(verifier, "fingerprint", type(verifier).__name__)),
        drafter=hashlib.blake2b(repr((kind, gamma, sorted(shape.items()))).encode(), digest_size=8).hexdigest(),
        dtype=str(getattr(verifier, "dtype", None)).removeprefix("torch."),
        threads=torch.get_num_threads(),
        runtime=runtime_mode(verifier),
    )


def runtime_mode(verifier: Any) -> str:
    """How the verifier runs: its own ``runtime_mode`` where it has one, else whether its weights are packed."""
    own = getattr(verifier, "runtime_mode", None)
    return own if isinstance(own, str) else "packed" if getattr(verifier, "num_packed", 0) else "eager"


def machine_name(device: torch.device) -> str:
    """The device the models run on, in words that another kind of machine would not share."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{describe_cpu()['model']}, {os.cpu_count()} cores, {device.type}"


def measure_costs(
    verifier: Verifier,
    drafter: Drafter,
    gamma: int,
    *,
    sampling: SamplingParams,
    node_counts: Sequence[int] = NODE_COUNTS,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    num_warmup: int = NUM_WARMUP,
    num_repeats: int = NUM_REPEATS,
) -> CostTable:
    """Time ``num_repeats`` rounds for each node count (root included), after ``num_warmup`` that do not count.

    Args:
        sampling: the verifier's law: turning logits into it is part of a round.

    Raises:
        ConfigError: the drafter cannot state its law, or the verifier's context is too short to measure in.
    """
    room = len(node_counts) + gamma + 1  # tokens after the prompt, the last window included
    num_prompt_tokens = min(num_prompt_tokens, verifier.max_length - room)
    if num_prompt_tokens < 1:
        raise ConfigError(
            f"num_nodes='auto' with a verifier context of {verifier.max_length} tokens: expected more than "
            f"{room} to measure costs in; give num_nodes as a number"
        )
    log.info("measuring what drafts and verifier passes cost here (once for this pair, a few seconds)")
    laps: list[tuple[int, float, float, float]] = []
    for repeat in range(-num_warmup, num_repeats):
        turn = repeat % len(node_counts)  # another count begins each time
        order = [*node_counts[turn:], *node_counts[:turn]]
        measured = _measure_rounds(verifier, drafter, gamma, sampling, order, num_prompt_tokens)
        laps += measured if repeat >= 0 else []
    return CostTable.from_medians(
        cost_key(verifier, drafter, gamma),
        draft_s=statistics.median(draft_s for _, draft_s, _, _ in laps),
        other_s=statistics.median(other_s for _, _, _, other_s in laps),
        verify_s={n: statistics.median(lap[2] for lap in laps if lap[0] == n) for n in node_counts},
    )


@torch.no_grad()
def _measure_rounds(
    verifier: Verifier,
    drafter: Drafter,
    gamma: int,
    sampling: SamplingParams,
    node_counts: Sequence[int],
    num_prompt_tokens: int,
) -> list[tuple[int, float, float, float]]:
    """(nodes, draft, verify, other seconds) of one round per node count, one after the other on one prompt."""
    prompt = [index % verifier.vocab_size for index in range(num_prompt_tokens)]
    room = len(node_counts) + gamma + 1
    session = verifier.start(prompt, room)
    drafter_session = start_drafter(drafter, prompt, SamplingParams(), room, session)
    to_probs = ProbsBuffer(sampling)
    watch = Stopwatch(getattr(verifier, "device", None))
    root, laps = prompt[-1], []
    for num_nodes in node_counts:
        watch.lap()
        law = draft_law(drafter, drafter_session, gamma)
        draft_s = watch.lap()
        best_first(law, root, max(num_nodes - 1, gamma))
        tree = _tree_of(root, num_nodes, gamma, verifier.vocab_size)
        tree_s = watch.lap()
        logits = session.score(tree)
        verify_s = watch.lap()
        next_token = int(to_probs(logits)[0].argmax())
        features = session.features([])
        session.commit([], next_token)
        drafter_session.observe([next_token], features)
        root = next_token
        laps.append((num_nodes, draft_s, verify_s, tree_s + watch.lap()))
    return laps


def _tree_of(root: int, num_nodes: int, gamma: int, vocab_size: int) -> TokenTree:
    """A tree of exactly ``num_nodes`` nodes, root included, and at most ``gamma`` levels; its tokens mean nothing."""
    parents = [0 if index % gamma == 0 else index for index in range(num_nodes - 1)]
    return TokenTree.best_first(root, [index % vocab_size for index in range(num_nodes - 1)], parents)
