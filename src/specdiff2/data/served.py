"""Rollouts sampled by a server: vLLM, SGLang, ``transformers serve`` or anything with OpenAI's interface.

Many requests are under way at once, across the borders of batches. What arrives is written to disk within about a
second, so neither a server nor this process loses more when it dies. The verifier here has no weights: its tokenizer
and vocabulary say what the ids mean. Whether the server has the same weights cannot be checked: the rollouts' origin is
``served:<model name>``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from specdiff2.data.generate import RolloutLaw
from specdiff2.data.prompt import check_count
from specdiff2.data.rollout_plan import PlannedRollout
from specdiff2.data.rollout_work import Batch, OpenBatches
from specdiff2.data.served_api import DIALECTS, BadAnswer, Dialect, read_answer, read_models, request_body
from specdiff2.data.served_client import ServedClient, ServerError
from specdiff2.data.served_text import completion_of
from specdiff2.models.fingerprint import SERVED
from specdiff2.types import ConfigError, Rollout, SpecDiffError

_log = logging.getLogger(__name__)
_FLUSH_SECONDS, _FLUSH_ROLLOUTS = 1.0, 256


class ServedEngine:
    """Section ``engine`` of ``rollout.py``.

    Args:
        url: of one server or several of the same model, ``http://host:8000/v1``.
        model: its name there; None: the only one that the server lists.
        interface: how token ids are had (``data.served_api``); ``auto`` tries all, the best first.
        concurrency: requests under way at once.
        max_retries: further tries of one request, with growing pauses of half a second to a minute.
        timeout_s: of one try.
        api_key_env: environment variable that holds the key; None: no key.

    Raises:
        ConfigError: a value out of range, or the variable is not set.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str | None = None,
        interface: Literal["auto", "token_ids", "logprobs", "sglang", "text", "chat"] = "auto",
        concurrency: int = 64,
        max_retries: int = 8,
        timeout_s: float = 600.0,
        api_key_env: str | None = None,
    ) -> None:
        check_count("engine.concurrency", concurrency, 1)
        check_count("engine.max_retries", max_retries, 0)
        self.urls = [url] if isinstance(url, str) else list(url)
        if not self.urls or not all(one.startswith(("http://", "https://")) for one in self.urls):
            raise ConfigError(f"engine.url={url!r}: expected one or a list like http://host:8000/v1")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(f"engine.api_key_env={api_key_env}: no such environment variable; put the key there")
        self._interface, self._concurrency = interface, concurrency
        self._max_retries, self._timeout_s, self._api_key_env = max_retries, timeout_s, api_key_env
        self._model = model
        self._dialect: Dialect | None = None  # found by the first request
        self.facts: dict[str, Any] = {"engine": "openai", "urls": self.urls, "concurrency": concurrency}

    @property
    def model(self) -> str:
        """What the server calls it. Raises ServerError or ConfigError: it cannot be asked, or has several."""
        if self._model is None:
            self._model = asyncio.run(self._only_model())
        return self._model

    @property
    def origin(self) -> str:
        """In place of the fingerprint of a verifier whose weights are here."""
        return SERVED + self.model

    def fill(self, verifier: Any, work: OpenBatches, law: RolloutLaw) -> None:
        """Raises:
        SpecDiffError: a server was lost or refuses; says how much is on disk and how to go on.
        MismatchError: it has another tokenizer or model.
        """
        try:
            _ = self.model  # asked for once, and not inside an event loop
            while batch := work.take(wait=True):  # this neither: it may wait for other processes
                asyncio.run(self._sample(verifier, work, law, batch))
        except ServerError as error:
            raise SpecDiffError(
                f"{error}; {work.store.num_known} of {len(work.plan)} rollouts are in {work.store.folder}: start the "
                "server again (or set engine.url), then run the same command again to go on"
            ) from error

    async def _sample(self, verifier: Any, work: OpenBatches, law: RolloutLaw, first: Batch) -> None:
        async with self._client() as client:
            dialect = self._dialect or await self._find_dialect(client, verifier, law, first.wanted[0])
            arrivals, source = _Arrivals(work), _requests(work, first)

            async def worker() -> None:
                for batch, item in source:
                    body = request_body(dialect, item, law, self.model, verifier)
                    answer = await client.ask(dialect.path, body, partial(read_answer, dialect))
                    ids, meta = completion_of(answer, item.prompt_ids, verifier, law.max_new_tokens)
                    arrivals.add(batch, item.rollout(ids, **meta))

            workers = [asyncio.create_task(worker()) for _ in range(self._concurrency)]
            try:
                done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                arrivals.flush()

    def _client(self) -> ServedClient:
        return ServedClient(
            self.urls,
            api_key=os.environ[self._api_key_env] if self._api_key_env else None,
            concurrency=self._concurrency,
            timeout_s=self._timeout_s,
            max_retries=self._max_retries,
        )

    async def _only_model(self) -> str:
        async with self._client() as client:
            names = await client.ask("/models", None, read_models)
        if len(names) != 1:
            raise ConfigError(f"{self.urls[0]} serves {names[:5]}: expected one model; choose with engine.model=...")
        return names[0]

    async def _find_dialect(
        self, client: ServedClient, verifier: Any, law: RolloutLaw, item: PlannedRollout
    ) -> Dialect:
        """The best one that works, tried on one token.

        Raises:
            ServerError: the server cannot be reached.
            ConfigError: none works; says why each did not.
        """
        probe = RolloutLaw(law.top_k, law.top_p, 1, law.seed)
        problems = []
        for dialect in DIALECTS:
            if self._interface not in ("auto", dialect.name):
                continue
            try:
                body = request_body(dialect, item, probe, self.model, verifier)
                data = await client.ask(dialect.path, body, lambda data: data, final=_is_refused)
                completion_of(read_answer(dialect, data), item.prompt_ids, verifier, 1)
            except (BadAnswer, SpecDiffError) as error:
                if isinstance(error, ServerError) and error.status is None:
                    raise
                problems.append(f"{dialect}: {error}")
                continue
            _log.info("%s, model %s: interface %s", ", ".join(self.urls), self.model, dialect)
            self._dialect, self.facts["interface"] = dialect, str(dialect)
            return dialect
        tried = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"engine.interface={self._interface}: not to be had from {self.urls[0]}; tried:{tried}")


def _is_refused(status: int) -> bool:
    """Of a first try: an interface that is not there may also be answered with 500."""
    return status not in (408, 429, 503)


def _requests(work: OpenBatches, first: Batch) -> Iterator[tuple[Batch, PlannedRollout]]:
    """What is to be asked, batch after batch; each is claimed when its first request is due."""
    batch: Batch | None = first
    while batch:
        for item in batch.wanted:
            yield batch, item
        batch = work.take(wait=False)


class _Arrivals:
    """Rollouts on their way to the disk, and batches until their last one is there."""

    def __init__(self, work: OpenBatches) -> None:
        self._work = work
        self._waiting: list[Rollout] = []
        self._num_left: dict[int, int] = {}
        self._flushed = time.monotonic()

    def add(self, batch: Batch, rollout: Rollout) -> None:
        self._waiting.append(rollout)
        left = self._num_left.get(batch.rows.start, len(batch.wanted)) - 1
        self._num_left[batch.rows.start] = left
        due = time.monotonic() - self._flushed > _FLUSH_SECONDS or len(self._waiting) >= _FLUSH_ROLLOUTS
        if due or left == 0:
            self.flush()
        if left == 0:  # only now that all of it is on disk
            self._work.release(batch)
            del self._num_left[batch.rows.start]

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._work.append(waiting)
        self._flushed = time.monotonic()
