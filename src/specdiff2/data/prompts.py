"""All prompt sources under one name: ``specdiff2.data.prompts.GsmSymbolicPrompts`` and so on."""

from specdiff2.data.gsm_symbolic import GsmSymbolicPrompts
from specdiff2.data.hub_prompts import HubPrompts
from specdiff2.data.humaneval_prompts import HumanEvalPrompts
from specdiff2.data.jsonl_prompts import JsonlPrompts
from specdiff2.data.prompt import Prompt, PromptSource

__all__ = ["GsmSymbolicPrompts", "HubPrompts", "HumanEvalPrompts", "JsonlPrompts", "Prompt", "PromptSource"]
