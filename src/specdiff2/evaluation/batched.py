"""Tokens per second against batch size: every method and the verifier alone, with several prompts at once.

Speculation spends arithmetic that a small batch leaves idle, so what it gains shrinks as batches grow. Prompts are cut
into blocks as large as the largest batch. A block is decoded with every method and batch size before the next block
starts, the methods of one batch size back to back, so that drift of the machine hits them alike; which comes first
rotates. Smaller batches refill the places of rows that end (``decoding.batch``). A prompt has the seed that it has
alone, so its output does not depend on the batch size. Statistics over blocks are ``evaluation.batched_rows``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.batched_rows import batched_name
from specdiff2.evaluation.benchmark import Benchmark, BenchmarkPrompt, Encoder
from specdiff2.evaluation.json_files import write_text
from specdiff2.evaluation.records import RECORDS_FILE, Record, RecordWriter, read_records
from specdiff2.protocols import Decoder
from specdiff2.types import ConfigError, Generation


class BatchedBenchmark(Benchmark):
    """Prompts x decoders x batch sizes, interleaved, resumable.

    Args:
        decoders: name -> decoder with ``generate_batch``. Records call it ``NAME_batch-N``, and NAME alone at batch
            size 1, which is always measured, with ``generate``.
        batch_sizes: prompts decoded at once. Prompts that do not fill a last block are left out.
        options: as ``Benchmark``.

    Raises:
        ConfigError: see ``Benchmark``, a batch size that is none, fewer prompts than the largest of them, or a decoder
            that decodes one prompt at a time only.
    """

    def __init__(
        self,
        prompts: Sequence[BenchmarkPrompt],
        encoder: Encoder,
        decoders: Mapping[str, Decoder],
        *,
        batch_sizes: Sequence[int],
        **options: Any,
    ) -> None:
        if not batch_sizes or any(
            isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in batch_sizes
        ):
            raise ConfigError(f"batch_sizes={batch_sizes!r}: expected integers >= 1, as in batch_sizes=[1,4,16]")
        sizes = sorted({1, *batch_sizes})
        self._block = sizes[-1]
        if len(prompts) < self._block:
            raise ConfigError(
                f"batch_sizes: {self._block} prompts at once, and the benchmark has {len(prompts)}: expected at least "
                "as many, better four times; raise its limit or num_prompts"
            )
        single = [name for name, decoder in decoders.items() if not hasattr(decoder, "generate_batch")]
        if single:
            raise ConfigError(f"batch_sizes: method {single[0]!r} decodes one prompt at a time; leave it out")
        self._sizes = {batched_name(name, size): size for size in sizes for name in decoders}
        named = {batched_name(name, size): decoder for size in sizes for name, decoder in decoders.items()}
        super().__init__(prompts[: len(prompts) // self._block * self._block], encoder, named, **options)
        self._settings = {name: {**known, "batch_size": self._sizes[name]} for name, known in self._settings.items()}

    def run(self, folder: Path | str, elsewhere: Collection[tuple[str, str]] = ()) -> Path:
        """Decode the blocks that ``folder/records.jsonl`` lacks, whole; returns its path. See ``Benchmark.run``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RECORDS_FILE
        done = self._resume(folder)
        turns = [
            turn for turn in self._turns() if not self._ids(turn[1]) <= {key for name, key in done if name == turn[0]}
        ]
        self._drop_cut(path, {(name, block) for name, block, _ in turns})
        if not turns:
            return path
        with RecordWriter(path) as writer, self._bar(len(turns) * self._block) as bar:
            for name in [name for name in self._decoders for _ in range(self._num_warmup)]:
                self._generate(name, range(self._sizes[name]), warmup=True)
            for name, block, order in turns:
                records = self._measure(name, block, order)
                writer.extend(records)
                seconds = sum(record.decode_s for record in records)
                speed = sum(len(record.tokens) for record in records) / seconds if seconds > 0 else 0.0
                bar.set_postfix_str(f"{name} {speed:.1f} tokens/s", refresh=False)
                bar.update(len(records))
        return path

    def _turns(self) -> list[tuple[str, int, int]]:
        """(name, block, order) in the order of decoding: a batch size after the other, its methods back to back."""
        turns = []
        sizes = sorted(set(self._sizes.values()))
        for block in range(len(self._prompts) // self._block):
            first = block % len(sizes)
            names = []
            for size in sizes[first:] + sizes[:first]:
                same = [name for name, own in self._sizes.items() if own == size]
                names += same[block % len(same) :] + same[: block % len(same)]
            turns += [(name, block, order) for order, name in enumerate(names)]
        return turns

    def _indices_of(self, block: int) -> range:
        return range(block * self._block, (block + 1) * self._block)

    def _ids(self, block: int) -> set[str]:
        return {self._prompts[index].prompt_id for index in self._indices_of(block)}

    def _measure(self, name: str, block: int, order: int) -> list[Record]:
        indices = self._indices_of(block)
        records = []
        for index, generation in zip(indices, self._generate(name, indices, warmup=False), strict=True):
            record = self._record(index, name, order, generation, warmup=False)
            record.batch_size, record.group = self._sizes[name], block
            if record.batch_size > 1:  # the text is that of batch size 1
                record.pieces = record.prompt = None
            records.append(record)
        return records

    def _generate(self, name: str, indices: range, *, warmup: bool) -> list[Generation]:
        decoder: Any = self._decoders[name]
        ids, rngs = [self._prompt_ids[i] for i in indices], [self._random_source(i) for i in indices]
        options = self._options(warmup)
        if self._sizes[name] == 1:
            return [decoder.generate(one, rng=rng, **options) for one, rng in zip(ids, rngs, strict=True)]
        return decoder.generate_batch(ids, batch_size=self._sizes[name], rngs=rngs, **options)

    def _drop_cut(self, path: Path, missing: set[tuple[str, int]]) -> None:
        """Take out what a killed process left of blocks that are decoded again."""
        records = read_records(path) if path.exists() else []
        kept = [record for record in records if (record.method, record.group) not in missing]
        if len(kept) < len(records):
            write_text(path, "".join(record.to_json() + "\n" for record in kept))
