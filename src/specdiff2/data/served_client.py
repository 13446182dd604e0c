"""HTTP to one or several servers of the same model: which is asked, what is tried again, when it is given up.

Tried again, with growing pauses: no connection, no answer in time, 408, 429, 5xx and answers that make no sense. Any
other refusal is final. Knows nothing of rollouts. ``httpx2`` comes with huggingface_hub; the ``openai`` package would
add only types for fields that OpenAI has, and half of what is sent here is not OpenAI's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx2

from specdiff2.data.served_api import BadAnswer
from specdiff2.types import SpecDiffError

_log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
Read = TypeVar("Read")


class ServerError(SpecDiffError):
    """A server refused for good, or every try failed. ``status``: of the last answer, None without one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServedClient:
    """Use as an asynchronous context.

    Args:
        urls: base URLs, as OpenAI's clients take them (``http://host:8000/v1``); the least busy one is asked.
        timeout_s: for one try, from connecting to the last byte.
        max_retries: further tries of one request, over all servers.
    """

    def __init__(
        self, urls: Sequence[str], *, api_key: str | None, concurrency: int, timeout_s: float, max_retries: int
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._timeout_s, self._max_retries = timeout_s, max_retries
        self._num_asked = dict.fromkeys(self.urls, 0)  # requests under way
        self._resting_until = dict.fromkeys(self.urls, 0.0)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
        )

    async def __aenter__(self) -> ServedClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[Any], Read],
        *,
        final: Callable[[int], bool] = lambda status: status < 500 and status not in (408, 429),
    ) -> Read:
        """``read`` of the answer to a POST (GET without ``body``).

        Args:
            path: below a URL; from ``..`` on, below the URL without ``/v1``.
            final: which statuses of refusals are not tried again.

        Raises:
            ServerError: refused, or every try failed.
        """
        for attempt in range(self._max_retries + 1):
            url = min(self.urls, key=lambda one: (self._resting_until[one] > time.monotonic(), self._num_asked[one]))
            try:
                async with asyncio.timeout(self._timeout_s):
                    return read(await self._once(url, path, body))
            except TimeoutError:
                problem, wait, status = f"no answer in {self._timeout_s:g} s", 0.0, None
            except httpx2.TransportError as error:
                problem, wait, status = f"{type(error).__name__}: {error}".rstrip(": "), 0.0, None
            except BadAnswer as error:
                problem, wait, status = f"an answer that makes no sense: {error}", 0.0, None
            except _Refusal as error:
                problem, wait, status = str(error), error.retry_after_s, error.status
                if final(status):
                    raise ServerError(f"{url}{path}: refused: {problem}", status) from error
            pause = min(max(wait, FIRST_PAUSE_S * 2**attempt), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            self._resting_until[url] = time.monotonic() + pause
            if attempt < self._max_retries:
                _log.debug("%s%s: %s; try %d", url, path, problem, attempt + 2)
                rested = any(until <= time.monotonic() for until in self._resting_until.values())
                await asyncio.sleep(0 if rested else pause)  # another server may do it at once
        raise ServerError(f"{url}{path}: given up after {self._max_retries + 1} tries; the last: {problem}", status)

    async def _once(self, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
        target = url.removesuffix("/v1") + path[2:] if path.startswith("..") else url + path
        self._num_asked[url] += 1
        try:
            response = await (self._http.get(target) if body is None else self._http.post(target, json=dict(body)))
        finally:
            self._num_asked[url] -= 1
        if response.status_code != 200:
            raise _Refusal(response)
        try:
            return response.json()
        except ValueError as error:
            raise BadAnswer(f"not JSON: {response.text[:200]!r}") from error


class _Refusal(Exception):
    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(f"status {response.status_code}: {' '.join(response.text.split())[:300]}")
        self.status = response.status_code
        after = response.headers.get("retry-after", "")
        self.retry_after_s = float(after) if after.isdigit() else 0.0
