"""What the YAML files call things, put together from the package's own classes.

Each callable here is a config schema: its parameters are the keys of a file in ``conf/`` (``verifier.temperature``,
``sampler.K``, ``objective.warmup_share``). Values that need no model are checked at construction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from specdiff2.data.prompt import PromptSource
from specdiff2.data.prompts import GsmSymbolicPrompts
from specdiff2.decoding.acceptance import check_combination, make_rule
from specdiff2.decoding.drafter_entries import DrafterEntry, gather, num_drafts_of, read_entries
from specdiff2.decoding.ensemble import check_ensemble, check_num_drafts
from specdiff2.decoding.samplers import check_grown_sampling, default_draft_temperature, make_growth
from specdiff2.decoding.selection import make_selector
from specdiff2.decoding.speculative import SpeculativeDecoder, check_confidence, check_steps
from specdiff2.decoding.tree_growth import GrowthSettings, NumNodes, RankPaths, Shape, check_growth, growth_settings
from specdiff2.models.verifier import HFVerifier
from specdiff2.objectives import ObjectiveSchedule, Stage
from specdiff2.protocols import Drafter, Objective, Verifier
from specdiff2.training.optim import warmup_cosine
from specdiff2.types import ConfigError, SamplingParams


def make_verifier(
    source: str,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str = "auto",
    attn_implementation: Literal["sdpa", "eager"] = "sdpa",
    device: str = "auto",
    cache_dir: str | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    thinking: bool | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    tp_plan: str | Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> HFVerifier:
    """``HFVerifier.from_pretrained`` with the law it decodes by as three plain keys."""
    sampling = SamplingParams(temperature, top_k, top_p)
    return HFVerifier.from_pretrained(
        source, revision=revision, gguf_file=gguf_file, dtype=dtype, attn_implementation=attn_implementation,
        device=device, sampling=sampling, cache_dir=cache_dir, thinking=thinking, device_map=device_map,
        tp_plan=tp_plan, quantization=quantization,
    )  # fmt: skip


@dataclass(frozen=True)
class SamplerSettings:
    """How one method decodes: rule, selection, K drafts of ``gamma`` positions (or a tree grown from the drafter's
    law), and the law drafts are drawn from.

    Attributes:
        name: how tables call the method.
        K: number of drafts; None means 1, or with ``drafters`` the sum of theirs.
        gamma: drafted positions, at most the drafter's; None means the drafter's own.
        temperature: of the drafter; None means 0 (the most probable window) for one draft of a rule that does not
            read draft probabilities, else 1.
        drafter: folder written by training, ``shipped`` for the one that comes with the package (see
            ``models.shipped``), or ``untrained`` for the layers as copied.
        drafters: several instead of ``drafter``, each {drafter, K, temperature, name}; see
            ``drafter_entries.DrafterEntry``. ``gamma`` None then means the smallest of theirs.
        num_nodes: drafted nodes of a grown tree, or ``auto``; None draws K drafts. See ``tree_growth.GrowthSettings``
            for it, ``max_nodes``, ``tree_temperature``, ``lookup_tokens``, ``lookup_ngram``, ``shape`` (None:
            best_first), ``branching`` and ``rank_paths``.
        min_confidence: drafts end before the argmax chain's probability falls below it; 0 never shortens.
        denoising_steps: passes that a window drafter fills its window in; None means its own.
        cost_folder: where ``auto`` keeps what it measured; None measures in every run.

    Raises:
        ConfigError, NotLosslessError: a combination that cannot work or would change the verifier's law.
    """

    name: str
    rule: str
    drafter: str | None = None
    selection: str | None = None
    K: int | None = None
    gamma: int | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    num_nodes: NumNodes | None = None
    max_nodes: int | None = None
    tree_temperature: float | None = None
    lookup_tokens: int | None = None
    lookup_ngram: int | None = None
    shape: Shape | None = None
    branching: int | None = None
    rank_paths: RankPaths | None = None
    min_confidence: float = 0.0
    denoising_steps: int | None = None
    cost_folder: str | None = None
    drafters: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        rule, selector = make_rule(self.rule), make_selector(self.selection)
        entries = self.entries()
        if entries:
            check_ensemble(rule, self.num_nodes)
            check_num_drafts(self.K, num_drafts_of(entries))
            for entry in entries:
                entry.sampling(self.temperature, self.top_k, self.top_p)
        elif self.drafter is None:
            raise ConfigError(f"drafter=None of sampler {self.name!r}: expected a drafter, or a list of drafters")
        check_combination(rule, selector, self.num_drafts)
        if self.gamma is not None and self.gamma < 1:
            raise ConfigError(f"gamma={self.gamma!r}: expected an integer >= 1, or null for the drafter's own")
        growth = self.growth()
        check_confidence(self.min_confidence)
        check_steps(self.denoising_steps)
        if growth is not None:
            check_growth(rule, selector, self.num_drafts)
            check_grown_sampling(self.draft_sampling())
            if self.gamma is not None:
                growth.check_gamma(self.gamma)
        self.draft_sampling()

    def entries(self) -> tuple[DrafterEntry, ...]:
        """``drafters``, checked; empty for one drafter."""
        return () if self.drafters is None else read_entries(self.drafters)

    @property
    def num_drafts(self) -> int:
        """K drafts of a round, of all drafters together."""
        if self.drafters is not None:
            return num_drafts_of(self.entries())
        return 1 if self.K is None else self.K

    def drafter_names(self) -> list[str]:
        """What is to be loaded: names of drafters, each once."""
        return list(dict.fromkeys([entry.drafter for entry in self.entries()] or [str(self.drafter)]))

    def with_drafters(self, resolve: Callable[[str], str]) -> SamplerSettings:
        """The same settings with ``resolve(name)`` for the name of each drafter; tables call it as before."""
        if self.drafters is None:
            return dataclasses.replace(self, drafter=resolve(str(self.drafter)))
        resolved = [dataclasses.replace(entry, drafter=resolve(entry.drafter)) for entry in self.entries()]
        return dataclasses.replace(self, drafters=[dataclasses.asdict(entry) for entry in resolved])

    def gather(self, load: Callable[[str], Drafter]) -> Drafter:
        """The drafter, or the ensemble of the drafters, that ``load`` makes of the names."""
        entries = self.entries()
        if not entries:
            return load(str(self.drafter))
        return gather(entries, load, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def growth(self) -> GrowthSettings | None:
        """How trees are grown; None where drafts are drawn."""
        return growth_settings(
            self.num_nodes, self.max_nodes, self.tree_temperature, self.lookup_tokens, self.lookup_ngram,
            self.shape, self.branching, self.rank_paths,
        )  # fmt: skip

    def draft_sampling(self) -> SamplingParams:
        """The law drafts are drawn from; the drafter's untempered law for a grown tree, and each entry's own law where
        there are several drafters."""
        if self.drafters is not None:
            return SamplingParams()
        default = 1.0 if self.growth() is not None else default_draft_temperature(make_rule(self.rule), self.num_drafts)
        return SamplingParams(default if self.temperature is None else self.temperature, self.top_k, self.top_p)

    def make(self, verifier: Verifier, drafter: Drafter) -> SpeculativeDecoder:
        """The decoder of these settings."""
        return SpeculativeDecoder(
            verifier, drafter, rule=make_rule(self.rule), selector=make_selector(self.selection), gamma=self.gamma,
            num_drafts=self.num_drafts, min_confidence=self.min_confidence, draft_sampling=self.draft_sampling(),
            denoising_steps=self.denoising_steps, name=self.name,
            growth=make_growth(self.growth(), verifier, drafter, gamma=self.gamma, cost_folder=self.cost_folder),
        )  # fmt: skip


def make_warmup_cosine(
    optimizer: Optimizer,
    num_steps: int,
    warmup_steps: int | None = None,
    warmup_share: float = 0.05,
    final_factor: float = 0.1,
) -> LambdaLR:
    """``warmup_cosine`` over ``warmup_steps`` (default: ``warmup_share`` of ``num_steps``).

    Raises:
        ConfigError: see ``warmup_cosine``.
    """
    if warmup_steps is None:
        warmup_steps = round(warmup_share * num_steps)
    return warmup_cosine(optimizer, num_steps=num_steps, warmup_steps=warmup_steps, final_factor=final_factor)


def make_schedule(
    main: Objective,
    max_steps: int,
    warmup: Objective | None = None,
    warmup_steps: int | None = None,
    warmup_share: float = 0.0,
    steps: int | None = None,
) -> ObjectiveSchedule:
    """``warmup`` for ``warmup_steps`` optimizer steps (default: ``warmup_share`` of ``max_steps``), then ``main``: for
    ``steps`` of them where that is given (``max_steps`` follows from it, see ``training_steps``).

    Raises:
        ConfigError: the warm-up leaves nothing for ``main``, or something other than ``steps``.
    """
    if steps is not None and warmup_steps is None:
        warmup_steps = max(0, max_steps - steps) if warmup is not None else 0
    if warmup_steps is None:
        if not 0.0 <= warmup_share < 1.0:
            raise ConfigError(f"objective.warmup_share={warmup_share!r}: expected 0 <= share < 1")
        warmup_steps = round(warmup_share * max_steps)
    if steps is not None and warmup_steps + steps != max_steps:
        raise ConfigError(
            f"objective.steps={steps} after {warmup_steps} steps of warm-up, but max_steps={max_steps}: leave "
            "max_steps out, it follows from objective.steps"
        )
    if not 0 <= warmup_steps < max_steps:
        raise ConfigError(
            f"objective.warmup_steps={warmup_steps!r}: expected 0 .. {max_steps - 1}, less than max_steps={max_steps}"
        )
    if warmup is None or warmup_steps == 0:
        return ObjectiveSchedule.single(main)
    return ObjectiveSchedule([Stage(warmup, warmup_steps), Stage(main)])


def training_steps(objective: Mapping[str, Any], default: int) -> int:
    """``max_steps`` where section ``objective`` names the ``steps`` after its warm-up; else ``default``."""
    steps, warmup_steps = objective.get("steps"), objective.get("warmup_steps")
    if steps is None:
        return default
    if objective.get("warmup") is None:
        return steps
    return round(steps / (1 - objective["warmup_share"])) if warmup_steps is None else warmup_steps + steps


def gsm_symbolic_suite(
    num_prompts: int = 40, num_held_out_prompts: int = 0, split: str = "test", seed: int = 0
) -> Mapping[str, PromptSource]:
    """Unseen questions of the templates trained on, and (``gsm_held_out``) of templates never trained on."""
    suite: dict[str, PromptSource] = {"gsm_symbolic": GsmSymbolicPrompts(split, "seen", num_prompts, seed)}  # type: ignore[arg-type]
    if num_held_out_prompts:
        suite["gsm_held_out"] = GsmSymbolicPrompts(split, "held_out", num_held_out_prompts, seed)  # type: ignore[arg-type]
    return suite


def suite(**sources: PromptSource) -> dict[str, PromptSource]:
    """Several named benchmarks, decoded one after the other in one run."""
    return sources
