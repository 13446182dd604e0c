"""Servers for tests of ``engine=openai``: the real ``transformers serve``, and one of our own with vLLM's interface.

vLLM and SGLang need CUDA or a build of their own and do not install here. ``TokenServer`` speaks the fields that they
document (see ``specdiff2.data.served_api``) and really computes with a tiny model, so that the paths that carry token
ids are exercised from end to end; it shows nothing about vLLM itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from helpers import char_tokenizer, tiny_llama
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from specdiff2.models.verifier import HFVerifier
from specdiff2.types import SamplingParams

VOCAB = 58  # exactly the character tokenizer's: no id without a token


def save_model(folder: Path, *, seed: int = 4) -> Path:
    """A tiny Llama whose answers are readable characters, now and then EOS."""
    model = tiny_llama(VOCAB, seed=seed, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    head = model.lm_head.weight
    for token in (0, 1, 3):  # never the most probable, and rare: a text without special tokens can be encoded again
        head[token] = 0.5 * head[10]
    model.save_pretrained(folder)
    char_tokenizer(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServeProcess:
    """``transformers serve`` on one model, in a process group of its own."""

    def __init__(self, model: Path, log: Path, *, port: int) -> None:
        self.model, self.port, self._log = model, port, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self, timeout_s: float = 120.0) -> None:
        command = [str(Path(sys.executable).with_name("transformers")), "serve", str(self.model), "--device", "cpu",
                   "--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1.0)
                return
            time.sleep(0.1)
        self.kill()
        raise AssertionError(f"transformers serve did not start:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """``kill -9``, the whole group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class TokenServer:
    """Answers as vLLM (``token_ids``, ``logprobs``), SGLang (``sglang``), or servers that give only text (``text``,
    ``chat``).

    Args:
        faults: what becomes of the next requests, in turn: a status, ``"hang"`` or ``"nonsense"``; None answers.
    """

    def __init__(self, verifier: HFVerifier, kind: str, name: str = "tiny") -> None:
        self.verifier, self.kind, self.name = verifier, kind, name
        self.faults: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.num_at_once = self.most_at_once = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """The base URL."""
        routes = [Route("/v1/models", self._models), Route("/v1/completions", self._completions, methods=["POST"]),
                  Route("/v1/chat/completions", self._chat, methods=["POST"]),
                  Route("/generate", self._generate, methods=["POST"])]  # fmt: skip
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="critical"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self.name}]})

    async def _completions(self, request: Request) -> Response:
        if self.kind in ("sglang", "chat"):
            return PlainTextResponse("no such path", 404)
        return await self._answer(request, self._openai)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, self._openai) if self.kind == "chat" else PlainTextResponse("no", 404)

    async def _generate(self, request: Request) -> Response:
        return await self._answer(request, self._sglang) if self.kind == "sglang" else PlainTextResponse("no", 404)

    async def _answer(self, request: Request, make: Any) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(0.005)  # others come in meanwhile
            fault = self.faults.pop(0) if self.faults else None
            if fault == "hang":
                await asyncio.sleep(30)
            if fault == "nonsense":
                return PlainTextResponse("<html>gateway</html>")
            if fault is not None:
                return PlainTextResponse("try later", fault, headers={"retry-after": "0"})
            return JSONResponse(make(body))
        finally:
            self.num_at_once -= 1

    def _sample(self, prompt: list[int], length: int, temperature: float, seed: int) -> tuple[list[int], str]:
        generator = torch.Generator().manual_seed(seed)
        (ids,) = self.verifier.sample_batch([prompt], SamplingParams(temperature), length, generator)
        return ids, "stop" if ids[-1] in self.verifier.eos_ids else "length"

    def _openai(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.verifier.tokenizer
        prompt = body.get("prompt")
        if self.kind == "chat":
            options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
            prompt = tokenizer.apply_chat_template(body["messages"], **options)
        ids, reason = self._sample(prompt, body["max_tokens"], body["temperature"], body["seed"])
        text = tokenizer.decode(ids[:-1] if reason == "stop" else ids)
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
        if self.kind == "token_ids" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if self.kind in ("token_ids", "logprobs") and body.get("return_tokens_as_token_ids"):
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in ids]}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        law = body["sampling_params"]
        ids, reason = self._sample(body["input_ids"], law["max_new_tokens"], law["temperature"], law["sampling_seed"])
        finish = {"type": reason, **({"matched": ids[-1]} if reason == "stop" else {"length": len(ids)})}
        meta = {"finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids)}
        return {"text": self.verifier.tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}
