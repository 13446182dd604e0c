"""What the prompts of a rollout store are recognised by: its own file, else what its rollouts' prompt ids decode to."""

from __future__ import annotations

import logging
from pathlib import Path

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.rollout_scan import read_shards
from specdiff2.data.signatures import SIGNATURES_FILE, Signatures, read_signatures, sign_texts

log = logging.getLogger(__name__)
_MARK = "prompt-goes-here"


def store_signatures(folder: Path, encoder: ChatEncoder) -> Signatures:
    """Signatures of the prompts in ``folder``; ``encoder`` is that of the verifier they were sampled from.

    Raises:
        CorruptFileError: the file of signatures or a shard is damaged.
    """
    path = folder / SIGNATURES_FILE
    if path.is_file():
        return read_signatures(path)
    log.info("%s: made before prompt signatures were kept; its prompts are decoded", folder)
    # what the chat template writes around a text; a prompt of another shape (a system message) is taken as a whole
    before, _, after = encoder.tokenizer.decode(encoder.encode(_MARK)).partition(_MARK)
    texts: dict[str, str] = {}
    for rollout in read_shards(folder):
        prompt_id = str(rollout.meta.get("prompt_id", rollout.rollout_id))
        if prompt_id not in texts:
            texts[prompt_id] = encoder.tokenizer.decode(rollout.prompt_ids).removeprefix(before).removesuffix(after)
    return sign_texts(texts.items())
