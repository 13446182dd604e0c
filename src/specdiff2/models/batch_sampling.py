"""Batched sampling of completions: the teacher rollouts.

Left padding, one preallocated cache, logits of the last position only, finished rows leave the batch at once. A row's
completion depends on its prompt, its index in the batch and the generator's state, never on the other rows, up to
floating-point rounding: its random numbers are drawn before the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import left_padded_causal_mask, left_padding_mask
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.types import SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.kv_cache import PreallocatedCache
    from specdiff2.models.verifier import HFVerifier


BLOCK = 256  # tokens per block of the two-level draw


@torch.inference_mode()
def sample_batch(
    verifier: HFVerifier,
    prompts: list[list[int]],
    sampling: SamplingParams,
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """One completion per prompt: at most ``max_new_tokens`` ids, ending with EOS where it was drawn.

    Prompts of similar length waste the least (sort them outside). ``generator`` advances by the same amount whatever
    the completions are.
    """
    if not prompts:
        return []
    device = verifier.device
    num_rows = len(prompts)
    uniforms = torch.rand(
        (num_rows, max_new_tokens), generator=generator, dtype=torch.float64, device=generator.device
    ).to(device)
    cache, logits, padding = _prefill(verifier, prompts, max_new_tokens)
    width = cache.length
    # the whole mask once; each step looks at its first columns
    mask = left_padding_mask(padding, width + max_new_tokens, verifier.dtype)
    completions: list[list[int]] = [[] for _ in prompts]
    alive = list(range(num_rows))  # alive[i]: the prompt that row i of the tensors belongs to
    for step in range(max_new_tokens):
        tokens = draw(logits, sampling, uniforms[alive, step])
        drawn = tokens.tolist()
        for row, token in zip(alive, drawn, strict=True):
            completions[row].append(token)
        if step == max_new_tokens - 1:
            break
        kept = surviving_rows([token not in verifier.eos_ids for token in drawn])
        if not kept:
            break
        if len(kept) < len(alive):
            cache.keep_rows(kept)
            tokens, padding, mask = tokens[kept], padding[kept], mask[kept]
            alive = [alive[row] for row in kept]
        length = width + step
        logits, _ = verifier.forward(
            tokens[:, None],
            cache=cache,
            mask=mask[..., : length + 1],
            positions=(length - padding)[:, None],
        )
        logits = logits[:, -1]
    return completions


def _prefill(
    verifier: HFVerifier, prompts: list[list[int]], max_new_tokens: int
) -> tuple[PreallocatedCache, Float[Tensor, "row vocab"], Int[Tensor, " row"]]:
    """Cache of all prompts (left-padded), logits after their last token, padding per row.

    A prompt that occurs several times is computed once.
    """
    device, dtype = verifier.device, verifier.dtype
    width = max(map(len, prompts))
    index = {key: i for i, key in enumerate(dict.fromkeys(map(tuple, prompts)))}
    padding = torch.tensor([width - len(key) for key in index], device=device)
    ids = torch.tensor([[0] * (width - len(key)) + list(key) for key in index], device=device)
    positions = (torch.arange(width, device=device)[None] - padding[:, None]).clamp(min=0)
    mask = left_padded_causal_mask(padding, width, dtype)
    cache = verifier.allocate_cache(len(index), width + max_new_tokens)
    logits, _ = verifier.forward(ids, cache=cache, mask=mask, positions=positions, logits_to_keep=1)
    source = [index[tuple(prompt)] for prompt in prompts]
    if len(index) < len(prompts):
        cache.repeat_rows(source)
    return cache, logits[:, -1][source], padding[source]


def surviving_rows(survives: list[bool]) -> list[int]:
    """Rows to keep, ordered so that few move: holes are filled from the end, the other rows stay where they are."""
    count = sum(survives)
    movers = [row for row in range(count, len(survives)) if survives[row]]
    return [row if survives[row] else movers.pop() for row in range(count)]


def draw(
    logits: Float[Tensor, "row vocab"], sampling: SamplingParams, uniforms: Float[Tensor, " row"]
) -> Int[Tensor, " row"]:
    """One token per row by inverse CDF; argmax at temperature 0. ``uniforms`` float64 in [0, 1)."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    probs = logits_to_probs(logits, sampling)
    blocks = torch.nn.functional.pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    # two levels, block then token: a float64 cumulative sum over the whole vocabulary costs a tenth of a step
    block_mass = blocks.sum(-1, dtype=torch.float64)
    block, rest = _invert(block_mass, uniforms * block_mass.sum(-1))
    token, _ = _invert(blocks[torch.arange(len(blocks), device=blocks.device), block].double(), rest)
    return block * BLOCK + token


def _invert(mass: Float[Tensor, "row item"], target: Float[Tensor, " row"]) -> tuple[Int[Tensor, " row"], Tensor]:
    """First item whose cumulative mass exceeds ``target`` (always one with mass > 0), and the target left inside it."""
    cumulative = mass.cumsum(-1)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # last item with mass: guards rounding at the end
    item = torch.minimum(torch.searchsorted(cumulative, target[:, None], right=True), last)
    before = cumulative.gather(1, item) - mass.gather(1, item)
    return item[:, 0], target - before[:, 0]
