"""All prompt sources under one name: ``specdiff2.data.prompts.GsmSymbolicPrompts`` and so on."""

from specdiff2.data.benchmark_prompts import BenchmarkPrompts, spec_bench
from specdiff2.data.code_stubs import CodeStubPrompts
from specdiff2.data.gsm_symbolic import GsmSymbolicPrompts
from specdiff2.data.hub_prompts import HubPrompts
from specdiff2.data.humaneval_prompts import HumanEvalPrompts
from specdiff2.data.jsonl_prompts import JsonlPrompts
from specdiff2.data.mixed_prompts import MixedPrompts
from specdiff2.data.open_questions import OpenQuestionPrompts
from specdiff2.data.prompt import Prompt, PromptSource

__all__ = [
    "BenchmarkPrompts",
    "CodeStubPrompts",
    "GsmSymbolicPrompts",
    "HubPrompts",
    "HumanEvalPrompts",
    "JsonlPrompts",
    "MixedPrompts",
    "OpenQuestionPrompts",
    "Prompt",
    "PromptSource",
    "spec_bench",
]
