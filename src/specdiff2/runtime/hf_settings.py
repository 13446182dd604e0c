"""Settings of transformers' own decoders as methods of a benchmark (``conf/sampler/hf_*.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specdiff2.decoding.hf_decoder import HFDecoder, HFOptions
from specdiff2.models.causal_export import check_assistant_source, load_assistant
from specdiff2.models.verifier import HFVerifier
from specdiff2.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class HFSettings(HFOptions):
    """``HFOptions`` with a name and, for ``kind=assisted``, the source of the assistant.

    Attributes:
        name: how tables call the method.
        assistant: a drafter folder (shifted, causal prefix, best trained with gamma=1), a folder of a causal language
            model with the verifier's tokenizer, or a hub id.
        cache_dir: where an exported drafter is kept.

    Raises:
        ConfigError: a value outside its range, or an assistant missing or not used.
    """

    name: str
    assistant: str | None = None
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.assistant is not None) != (self.kind == "assisted"):
            raise ConfigError(f"assistant={self.assistant!r} with kind={self.kind!r}: only kind=assisted has one")

    def check(self) -> None:
        """Refuse a missing or useless assistant before any model loads.

        Raises:
            ConfigError, CorruptFileError: see ``check_assistant_source``.
        """
        if self.assistant is not None:
            check_assistant_source(self.assistant, self.cache_dir)

    def make(self, verifier: HFVerifier) -> HFDecoder:
        """The decoder of these settings.

        Raises:
            ConfigError, MismatchError, CorruptFileError: the assistant cannot be loaded or does not fit the verifier.
        """
        assistant = None if self.assistant is None else load_assistant(self.assistant, verifier, self.cache_dir)
        options = HFOptions(**{field.name: getattr(self, field.name) for field in fields(HFOptions)})
        return HFDecoder(verifier, options, assistant=assistant, name=self.name)
