"""Decodes every prompt with every method and writes one record per generation.

All methods decode a prompt back to back before the next prompt, with the same random seed, so that slow
drift of the machine hits every method alike; which method goes first rotates with the prompt. Knows
decoders only by their protocol and computes no statistic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from specdiff2.evaluation.decoder_info import describe_decoder
from specdiff2.evaluation.json_files import read_json, write_json
from specdiff2.evaluation.parts import Part, prompts_digest
from specdiff2.evaluation.records import RECORDS_FILE, Record, RecordWriter, drop_half_line, read_records
from specdiff2.protocols import Decoder
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, Generation, MismatchError

MANIFEST_FILE = "benchmark.json"
_WARMUP_TOKENS = 32  # enough to touch every code path and shape class; warm-up is not measured


class BenchmarkPrompt(Protocol):
    """What a prompt must offer (``data.prompts.Prompt``)."""

    prompt_id: str
    messages: list[dict[str, Any]]
    answer: str | None


class Encoder(Protocol):
    """Messages to token ids (``data.chat.ChatEncoder``)."""

    def encode(self, prompt: Any) -> list[int]: ...


def prompt_seed(seed: int, prompt: int | str) -> int:
    """Seed of one prompt's generation, from its index or name: the same for every method, unrelated between prompts."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt}".encode()).digest()[:6], "big")


class Benchmark:
    """Prompts x decoders, interleaved, resumable.

    Args:
        decoders: name -> decoder; the order is the order of the tables. The name becomes ``Record.method``.
        num_warmup: prompts decoded beforehand by every method without being measured (they are decoded
            again, and then measured, in their turn).
        num_samples: prompts whose token texts are stored too, for the report's coloured sample.
        part: where the prompts lie in the whole benchmark; None: they are all of it.

    Raises:
        ConfigError: no prompts, no decoders, duplicate prompt ids, a bad number, an empty or too long prompt.
    """

    def __init__(
        self,
        prompts: Sequence[BenchmarkPrompt],
        encoder: Encoder,
        decoders: Mapping[str, Decoder],
        *,
        benchmark_name: str = "benchmark",
        max_new_tokens: int = 128,
        seed: int = 0,
        num_warmup: int = 1,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        num_samples: int = 3,
        progress: bool = True,
        part: Part | None = None,
    ) -> None:
        for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("num_warmup", num_warmup, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: expected an integer >= {least}")
        if not prompts:
            raise ConfigError(f"benchmark {benchmark_name!r} has no prompts: expected at least one; check its source")
        if not decoders:
            raise ConfigError(f"benchmark {benchmark_name!r} has no decoders: expected at least one")
        self._prompts = list(prompts)
        self._decoders = dict(decoders)
        self._encoder = encoder
        self._name = benchmark_name
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._num_warmup = num_warmup
        self._stop_ids = tuple(stop_ids)
        self._stop_strings = tuple(stop_strings)
        self._num_samples = num_samples
        self._progress = progress
        self._part = part
        self._indices = range(len(self._prompts)) if part is None else part.indices
        self._prompt_ids = [self._encode(prompt) for prompt in self._prompts]
        self._settings = {name: describe_decoder(decoder) for name, decoder in self._decoders.items()}
        self._check_prompts()
        self._check_temperatures()

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._prompt_ids))

    @property
    def prompt_tokens(self) -> dict[str, list[int]]:
        """Token ids by prompt id."""
        return {prompt.prompt_id: ids for prompt, ids in zip(self._prompts, self._prompt_ids, strict=True)}

    def run(self, folder: Path | str, elsewhere: Collection[tuple[str, str]] = ()) -> Path:
        """Decode what ``folder/records.jsonl`` lacks; returns its path. A decoder's error propagates, and
        everything measured before it stays on disk, so that a second call continues.

        Args:
            elsewhere: (method, prompt id) that another process has measured.

        Raises:
            MismatchError: the folder holds records of other settings.
            CorruptFileError: its settings or records cannot be read.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RECORDS_FILE
        done = self._resume(folder) | set(elsewhere)
        num_left = sum((name, one.prompt_id) not in done for one in self._prompts for name in self._decoders)
        if num_left == 0:
            return path
        with RecordWriter(path) as writer, self._bar(num_left + self._num_warmup * len(self._decoders)) as bar:
            for index in range(self._num_warmup):
                self._run_prompt(index % len(self._prompts), writer, bar, done=set(), warmup=True)
            for index in range(len(self._prompts)):
                self._run_prompt(index, writer, bar, done=done, warmup=False)
        return path

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides what the records say, tokens and seconds, apart from the machine."""
        return {
            "benchmark": self._name,
            "num_prompts": len(self._prompts),
            "prompts_sha256": prompts_digest(self.prompt_tokens.items()),
            "max_new_tokens": self._max_new_tokens,
            "seed": self._seed,
            "stop_ids": list(self._stop_ids),
            "stop_strings": list(self._stop_strings),
            "threads": torch.get_num_threads(),
            "decoders": self._settings,
            **({} if self._part is None else {"whole": dict(self._part.whole)}),
        }

    def _run_prompt(
        self, index: int, writer: RecordWriter, bar: tqdm[Any], *, done: set[tuple[str, str]], warmup: bool
    ) -> None:
        """All methods on one prompt, starting with another method than the prompt before."""
        names = list(self._decoders)
        first = index % len(names)
        for order, name in enumerate(names[first:] + names[:first]):
            if (name, self._prompts[index].prompt_id) in done:
                continue
            record = self._decode(index, name, order, warmup)
            writer.append(record)
            speed = len(record.tokens) / record.decode_s if record.decode_s > 0 else 0.0
            bar.set_postfix_str(f"{'warm-up, ' if warmup else ''}{name} {speed:.1f} tokens/s", refresh=False)
            bar.update()

    def _decode(self, index: int, name: str, order: int, warmup: bool) -> Record:
        generation = self._decoders[name].generate(
            self._prompt_ids[index], rng=self._random_source(index), **self._options(warmup)
        )
        return self._record(index, name, order, generation, warmup)

    def _random_source(self, index: int) -> TorchRandomSource:
        """That of a prompt, the same for every method."""
        return TorchRandomSource(prompt_seed(self._seed, self._indices[index]))

    def _options(self, warmup: bool) -> dict[str, Any]:
        """When a generation ends."""
        length = min(self._max_new_tokens, _WARMUP_TOKENS) if warmup else self._max_new_tokens
        return {"max_new_tokens": length, "stop_ids": self._stop_ids, "stop_strings": self._stop_strings}

    def _record(self, index: int, name: str, order: int, generation: Generation, warmup: bool) -> Record:
        prompt, ids = self._prompts[index], self._prompt_ids[index]
        tokenizer = getattr(self._encoder, "tokenizer", None)
        is_sample = not warmup and tokenizer is not None and self._indices[index] < self._num_samples
        settings = self._settings[name]
        return Record(
            method=name,
            prompt_id=prompt.prompt_id,
            benchmark=self._name,
            seed=self._seed,
            temperature=settings["temperature"],
            tokens=list(generation.tokens),
            text=generation.text,
            stop_reason=generation.stop_reason,
            prefill_s=generation.prefill_s,
            decode_s=generation.decode_s,
            rounds=generation.rounds,
            gamma=settings.get("gamma", 0),
            num_drafts=settings.get("num_drafts", 0),
            order=order,
            prompt_index=self._indices[index],
            prompt_ids=ids,
            prompt=_last_message(prompt) if is_sample else None,
            answer=prompt.answer,
            pieces=token_pieces(tokenizer, generation.tokens) if is_sample else None,
            warmup=warmup,
            runtime=settings.get("verifier_runtime_mode"),
            drafters=list(settings["drafters"]) if "drafters" in settings else None,
        )

    def _encode(self, prompt: BenchmarkPrompt) -> list[int]:
        ids = list(self._encoder.encode(prompt.messages))
        if not ids:
            raise ConfigError(f"prompt {prompt.prompt_id!r} encodes to no tokens: expected text; remove or fill it")
        return ids

    def _check_prompts(self) -> None:
        """Duplicate ids, and prompts that no decoder could finish, are found before any work."""
        seen: set[str] = set()
        for prompt, ids in zip(self._prompts, self._prompt_ids, strict=True):
            if prompt.prompt_id in seen:
                raise ConfigError(f"prompt id {prompt.prompt_id!r} occurs twice: expected unique ids; rename one")
            seen.add(prompt.prompt_id)
            for decoder in self._decoders.values():
                limit = getattr(getattr(decoder, "verifier", None), "max_length", None)
                if limit is not None and len(ids) + self._max_new_tokens > limit:
                    raise ConfigError(
                        f"prompt {prompt.prompt_id!r} has {len(ids)} tokens, with max_new_tokens="
                        f"{self._max_new_tokens} beyond the verifier's context of {limit}: shorten one of them"
                    )

    def _check_temperatures(self) -> None:
        for name, settings in self._settings.items():
            if "temperature" not in settings:
                raise ConfigError(
                    f"decoder {name!r} does not tell its temperature: expected an attribute `sampling` "
                    "(SamplingParams) or a method `describe()` that returns it"
                )

    def _resume(self, folder: Path) -> set[tuple[str, str]]:
        """(method, prompt id) already measured in ``folder``, after checking that the settings are the same."""
        manifest, path = folder / MANIFEST_FILE, folder / RECORDS_FILE
        current = self.fingerprint()
        if not path.exists():
            write_json(manifest, current)
            return set()
        remedy = "the settings its records were measured with; use another folder, or delete this one to measure again"
        stored = read_json(manifest, remedy) if manifest.exists() else {}
        difference = first_difference(stored, json.loads(json.dumps(current)))
        if difference is not None:
            key, old, new = difference
            raise MismatchError(
                f"{path} was measured with {key}={old!r}, now {key}={new!r}: expected the same settings to continue; "
                "use another folder, or delete it to measure again"
            )
        drop_half_line(path)
        return {(record.method, record.prompt_id) for record in read_records(path) if not record.warmup}

    def _bar(self, total: int) -> tqdm[Any]:
        return tqdm(total=total, desc=self._name, unit="gen", disable=not self._progress, dynamic_ncols=True)


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Text of each token; they join to the decoded text, special tokens included.

    A character cut between tokens belongs to the token that completes it.
    """
    pieces, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:end]), skip_special_tokens=False)
        complete = text[: len(text.rstrip("\N{REPLACEMENT CHARACTER}"))]
        pieces.append(complete[len(shown) :])
        shown = max(shown, complete, key=len)
    return pieces


def _last_message(prompt: BenchmarkPrompt) -> str:
    return str(prompt.messages[-1].get("content", "")) if prompt.messages else ""


def first_difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, old value, new value) of the first difference of two nested dictionaries."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*new, *(name for name in old if name not in new)]:
            found = first_difference(old.get(name), new.get(name), f"{key}.{name}" if key else name)
            if found is not None:
                return found
        return None
    return None if old == new else (key, old, new)
