"""Figure 6 of the paper (arXiv 2511.00606): think for some seconds, be told that time is over, answer, be graded.

Every method thinks once about every prompt, up to the largest budget (``budgeted_thought``: why once is enough); for
each budget its thought is cut there, the closing is appended and the answer decoded greedily by the same method,
outside the budget. Prefill counts into the budget, warm-up does not. Methods take turns on each prompt with the same
random seed, and which goes first rotates, as in ``evaluation.benchmark``. Knows decoders only by their protocol.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from specdiff2.evaluation.accuracy import grade
from specdiff2.evaluation.benchmark import Benchmark, Encoder, prompt_seed
from specdiff2.evaluation.budgeted_records import BUDGETED_FILE, BudgetRecord, read_budget_records, whole_groups
from specdiff2.evaluation.budgeted_settings import BudgetSection
from specdiff2.evaluation.budgeted_thought import Clock, Thought, think
from specdiff2.evaluation.decoder_info import describe_decoder
from specdiff2.evaluation.json_files import read_json, write_json, write_text
from specdiff2.evaluation.records import drop_half_line
from specdiff2.protocols import Decoder
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Generation, MismatchError, SamplingParams

MANIFEST_FILE = "budgeted.json"
_WARMUP_TOKENS = 32


class BudgetedBenchmark:
    """Prompts x decoders x budgets, interleaved, resumable.

    Args:
        prompts: as ``Benchmark`` takes them, with ``answer`` or ``meta["score_answer"]``.
        encoder: has a ``tokenizer``.
        decoders: name -> decoder with an attribute ``sampling``.
        clock: seconds; only thinking is timed with it.

    Raises:
        ConfigError: as ``Benchmark`` (the longest prompt needs room for thought, closing and answer), or a prompt that
            cannot be graded.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        encoder: Encoder,
        decoders: Mapping[str, Decoder],
        settings: BudgetSection,
        *,
        benchmark_name: str = "benchmark",
        seed: int = 0,
        num_warmup: int = 1,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        clock: Clock = time.perf_counter,
        progress: bool = True,
    ) -> None:
        self._prompts, self._encoder = list(prompts), encoder
        self._decoders: dict[str, Any] = dict(decoders)
        self._tokenizer: Any = getattr(encoder, "tokenizer", None)
        self._settings, self._name, self._seed, self._clock = settings, benchmark_name, seed, clock
        self._num_warmup, self._progress = num_warmup, progress
        self._stops: dict[str, Any] = {"stop_ids": tuple(stop_ids), "stop_strings": tuple(stop_strings)}
        for prompt in self._prompts:
            grade("", prompt.answer, prompt.meta.get("score_answer"))
        closing = max((len(self._closed(p, [])) - len(encoder.encode(p.messages)) for p in prompts), default=0)
        self.max_new_tokens = settings.max_thought_tokens + closing + settings.answer_tokens
        self._plain = Benchmark(  # its checks and its fingerprint
            prompts, encoder, decoders, benchmark_name=benchmark_name, max_new_tokens=self.max_new_tokens, seed=seed,
            num_warmup=num_warmup, stop_ids=stop_ids, stop_strings=stop_strings, progress=progress,
        )  # fmt: skip
        self._described = {name: describe_decoder(decoder) for name, decoder in self._decoders.items()}

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self._plain.longest_prompt

    def run(self, folder: Path | str) -> Path:
        """Measure what ``folder/budgeted.jsonl`` lacks; returns its path. What was measured before an error stays.

        Raises:
            MismatchError: the folder holds records of other settings.
            CorruptFileError: its settings or records cannot be read.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path, names = folder / BUDGETED_FILE, list(self._decoders)
        done = self._resume(folder)
        turns = [
            (index, name, order)
            for index, prompt in enumerate(self._prompts)
            for order, name in enumerate(names[index % len(names) :] + names[: index % len(names)])
            if (name, prompt.prompt_id) not in done
        ]
        if turns:
            self._warm_up()
        bar = tqdm(turns, desc=self._name, unit="thought", disable=not self._progress, dynamic_ncols=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            for turn in bar:
                file.write("".join(record.to_json() + "\n" for record in self._measure(*turn)))
                file.flush()
        return path

    def _warm_up(self) -> None:
        for index in range(self._num_warmup):
            prompt = self._encoder.encode(self._prompts[index % len(self._prompts)].messages)
            for decoder in self._decoders.values():
                length = min(self._settings.max_thought_tokens, _WARMUP_TOKENS)
                decoder.generate(prompt, max_new_tokens=length, rng=TorchRandomSource(self._seed), **self._stops)

    def _measure(self, index: int, name: str, order: int) -> list[BudgetRecord]:
        """One thought, and its answer at every budget; equal parts of a thought are answered once."""
        settings, prompt, decoder = self._settings, self._prompts[index], self._decoders[name]
        thought = think(
            decoder,
            self._encoder.encode(prompt.messages),
            budget_s=settings.seconds[-1],
            max_tokens=settings.max_thought_tokens,
            rng=TorchRandomSource(prompt_seed(self._seed, index)),
            clock=self._clock,
            **self._stops,
        )
        answers: dict[int, Generation] = {}
        records = []
        for budget_s in settings.seconds:
            part = thought.within(budget_s)
            if len(part.tokens) not in answers:
                answers[len(part.tokens)] = self._answer(prompt, decoder, part.tokens)
            record = self._record(index, name, budget_s, part, answers[len(part.tokens)])
            record.order = order
            records.append(record)
        records[-1].thought = thought.tokens
        return records

    def _answer(self, prompt: Any, decoder: Decoder, thought: Sequence[int]) -> Generation:
        """The method's own greedy decoding after the closing."""
        greedy: Any = copy.copy(decoder)
        greedy.sampling = SamplingParams(temperature=0.0)
        return greedy.generate(
            self._closed(prompt, thought),
            max_new_tokens=self._settings.answer_tokens,
            rng=TorchRandomSource(self._seed),  # draws drafts only
        )

    def _closed(self, prompt: Any, thought: Sequence[int]) -> list[int]:
        """Prompt, thought and closing as ids; the token that ended the thought, if one did, is left out."""
        ends = {*self._stops["stop_ids"], *self._eos_ids()}
        kept = list(thought[:-1] if thought and thought[-1] in ends else thought)
        closing = self._settings.closing
        if self._settings.closing_role == "assistant":
            added = self._tokenizer.encode(closing, add_special_tokens=False)
            return [*self._encoder.encode(prompt.messages), *kept, *added]
        turns = [{"role": "assistant", "content": self._tokenizer.decode(kept, skip_special_tokens=True)},
                 {"role": "user", "content": closing}]  # fmt: skip
        return list(self._encoder.encode([*prompt.messages, *turns]))

    def _eos_ids(self) -> set[int]:
        return {token for one in self._decoders.values() for token in one.verifier.eos_ids}

    def _record(self, index: int, name: str, budget_s: float, part: Thought, answer: Generation) -> BudgetRecord:
        prompt, described = self._prompts[index], self._described[name]
        verdict = grade(answer.text, prompt.answer, prompt.meta.get("score_answer"))
        return BudgetRecord(
            method=name,
            benchmark=self._name,
            prompt_id=prompt.prompt_id,
            prompt_index=index,
            order=0,
            seed=self._seed,
            temperature=described["temperature"],
            gamma=described.get("gamma", 0),
            num_drafts=described.get("num_drafts", 0),
            runtime=described.get("verifier_runtime_mode"),
            budget_s=float(budget_s),
            num_thought_tokens=len(part.tokens),
            num_rounds=len(part.round_ends_s),
            thought_s=round(part.seconds, 6),
            ended=part.stop_reason,
            answer=answer.text,
            num_answer_tokens=answer.num_tokens,
            answer_s=round(answer.prefill_s + answer.decode_s, 6),
            correct=verdict.correct,
            score=verdict.score,
            scorer_error=verdict.error,
        )

    def _resume(self, folder: Path) -> set[tuple[str, str]]:
        """(method, prompt id) already measured with these settings; what is left of a killed turn is dropped."""
        manifest, path = folder / MANIFEST_FILE, folder / BUDGETED_FILE
        current = json.loads(json.dumps({**self._plain.fingerprint(), "budget": asdict(self._settings)}))
        if not path.exists():
            write_json(manifest, current)
            return set()
        stored = read_json(manifest, "the settings its records were measured with; delete the folder") or {}
        for key, value in current.items():
            if stored.get(key) != value:
                raise MismatchError(
                    f"{path} was measured with {key}={stored.get(key)!r}, now {key}={value!r}: expected the same "
                    "settings to continue; use another folder, or delete it to measure again"
                )
        drop_half_line(path)
        records = read_budget_records(path)
        whole = whole_groups(records, len(self._settings.seconds))
        kept = [record for group in whole.values() for record in group]
        if len(kept) < len(records):
            write_text(path, "".join(record.to_json() + "\n" for record in kept))
        return set(whole)
