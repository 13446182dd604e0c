"""Contexts on disk: exact numbers back, another origin starts afresh, a killed write loses one rollout at most."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from specdiff2.data.context_memory import ContextMemory

ORIGIN = {"verifier": "abc", "layers": [1, 2], "dtype": "torch.bfloat16"}


def compute_of(calls: list[list[int]], dtype: torch.dtype = torch.bfloat16):
    def compute(ids: list[int]) -> torch.Tensor:
        calls.append(ids)
        return torch.randn(len(ids), 5, generator=torch.Generator().manual_seed(sum(ids))).to(dtype)

    return compute


def test_numbers_come_back_exactly_also_in_a_new_process(tmp_path) -> None:
    calls: list[list[int]] = []
    memory = ContextMemory(tmp_path, ORIGIN)
    first = memory([1, 2, 3], compute_of(calls))
    second = memory([4, 5], compute_of(calls))
    for again in (memory, ContextMemory(tmp_path, ORIGIN)):
        assert torch.equal(again([1, 2, 3], compute_of(calls)), first)
        assert torch.equal(again([4, 5], compute_of(calls)), second)
    assert calls == [[1, 2, 3], [4, 5]]


def test_another_origin_is_computed_again_and_said(tmp_path, caplog) -> None:
    calls: list[list[int]] = []
    ContextMemory(tmp_path, ORIGIN)([1, 2], compute_of(calls))
    other = ContextMemory(tmp_path, ORIGIN | {"verifier": "other"})
    assert "another origin" in caplog.text and len(other) == 0
    other([1, 2], compute_of(calls))
    assert calls == [[1, 2], [1, 2]]


@pytest.mark.parametrize("damage", ["half a line", "numbers cut"])
def test_a_killed_write_loses_one_rollout_at_most(tmp_path, damage: str) -> None:
    calls: list[list[int]] = []
    memory = ContextMemory(tmp_path, ORIGIN)
    first = memory([1, 2, 3], compute_of(calls))
    memory([7, 8], compute_of(calls))
    if damage == "half a line":
        index = tmp_path / "index.jsonl"
        index.write_bytes(index.read_bytes()[:-9])
    else:
        numbers = tmp_path / "contexts.bin"
        numbers.write_bytes(numbers.read_bytes()[:-3])
    again = ContextMemory(tmp_path, ORIGIN)
    expected = again([7, 8], compute_of(calls))
    assert torch.equal(again([1, 2, 3], compute_of(calls)), first)
    assert torch.equal(ContextMemory(tmp_path, ORIGIN)([7, 8], compute_of(calls)), expected)
    assert calls == [[1, 2, 3], [7, 8], [7, 8]]


def test_a_lost_entry_does_not_come_true_when_the_file_has_grown(tmp_path) -> None:
    """Its line points behind the end of the numbers; later numbers there are another rollout's."""
    calls: list[list[int]] = []
    memory = ContextMemory(tmp_path, ORIGIN)
    memory([1, 2, 3], compute_of(calls))
    expected = memory([7, 8], compute_of(calls))
    numbers = tmp_path / "contexts.bin"
    numbers.write_bytes(numbers.read_bytes()[:-20])
    ContextMemory(tmp_path, ORIGIN)([4, 5, 6], compute_of(calls))
    assert torch.equal(ContextMemory(tmp_path, ORIGIN)([7, 8], compute_of(calls)), expected)


def test_an_unreadable_line_is_dropped_and_said(tmp_path, caplog) -> None:
    calls: list[list[int]] = []
    memory = ContextMemory(tmp_path, ORIGIN)
    memory([1, 2, 3], compute_of(calls))
    expected = memory([7, 8], compute_of(calls))
    index = tmp_path / "index.jsonl"
    first, second, _ = index.read_bytes().split(b"\n")
    index.write_bytes(bytes(len(first)) + b"\n" + second + b"\n")
    again = ContextMemory(tmp_path, ORIGIN)
    assert "1 unfinished entries dropped" in caplog.text
    assert torch.equal(again([7, 8], compute_of(calls)), expected) and calls == [[1, 2, 3], [7, 8]]


def test_two_writers_do_not_mix_their_numbers(tmp_path) -> None:
    """Ranks of one run: what one has added is unknown to the other, and both read their own numbers."""
    calls: list[list[int]] = []
    one, two = ContextMemory(tmp_path, ORIGIN), ContextMemory(tmp_path, ORIGIN)
    expected = [memory([k, 2, k], compute_of(calls)) for k in range(4) for memory in (one, two)]
    found = [memory([k, 2, k], compute_of(calls)) for k in range(4) for memory in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(calls) == 8 and len(ContextMemory(tmp_path, ORIGIN)) == 4


def append_many(folder: str, start: int) -> None:
    memory = ContextMemory(folder, ORIGIN)
    for k in range(start, start + 60):
        memory([k] * (1 + k % 5), compute_of([]))


def test_processes_write_at_the_same_time(tmp_path) -> None:
    context = multiprocessing.get_context("fork")  # nothing has to be imported again
    writers = [context.Process(target=append_many, args=(str(tmp_path), start)) for start in (0, 1000, 2000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    memory, calls = ContextMemory(tmp_path, ORIGIN), []
    for k in (start + offset for start in (0, 1000, 2000) for offset in range(60)):
        ids = [k] * (1 + k % 5)
        assert torch.equal(memory(ids, compute_of(calls)), compute_of([])(ids))
    assert not calls


def test_nothing_more_is_kept_beyond_the_limit(tmp_path, caplog) -> None:
    calls: list[list[int]] = []
    memory = ContextMemory(tmp_path, ORIGIN, max_bytes=40)
    for ids in ([1, 2, 3], [4, 5], [1, 2, 3], [4, 5]):
        memory(ids, compute_of(calls))
    assert calls == [[1, 2, 3], [4, 5], [4, 5]] and "its limit" in caplog.text


def test_a_wrong_dtype_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"expected torch\.bfloat16"):
        ContextMemory(tmp_path, ORIGIN)([1], compute_of([], torch.float32))
