"""Conversations of several user turns as single prompts, one for each turn, with what came before as history.

Earlier turns are answered once, by whoever ``answer`` stands for, so every method that decodes a turn continues from
the same history and turns stay paired. (Spec-Bench and FastChat let each method answer its own earlier turns: at
temperature 0 that is the same text for a lossless method, at other temperatures the prompts would differ.)
It knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdiff2.data.prompt import Prompt


def num_turns(prompt: Prompt) -> int:
    """User turns that a verifier is to answer."""
    return 1 + len(prompt.later_turns)


def unroll_turns(prompts: Sequence[Prompt], answer: Callable[[Prompt], str]) -> list[Prompt]:
    """Prompts of one turn as they are; of several turns one prompt each, ``ID/turn1``, ``ID/turn2`` and so on.

    Args:
        answer: the text that answers a prompt of one turn; asked for every turn but the last, in order.
    """
    unrolled: list[Prompt] = []
    for prompt in prompts:
        unrolled += [prompt] if not prompt.later_turns else _turns(prompt, answer)
    return unrolled


def _turns(prompt: Prompt, answer: Callable[[Prompt], str]) -> list[Prompt]:
    messages, turns = list(prompt.messages), []
    for number in range(1, num_turns(prompt) + 1):
        if number > 1:
            reply = {"role": "assistant", "content": answer(turns[-1])}
            messages = [*messages, reply, {"role": "user", "content": prompt.later_turns[number - 2]}]
        meta = {**prompt.meta, "conversation": prompt.prompt_id, "turn": number}
        is_last = number == num_turns(prompt)  # a reference answer is one to the whole conversation
        turns.append(Prompt(f"{prompt.prompt_id}/turn{number}", messages, prompt.answer if is_last else None, meta))
    return turns
