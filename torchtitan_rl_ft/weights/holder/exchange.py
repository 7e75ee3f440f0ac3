"""One request and its answer, both JSON."""

from __future__ import annotations

from typing import Any

import aiohttp


class NoAnswer(Exception):
    """Nobody answered in time, or not with an object."""


async def exchange(
    http: aiohttp.ClientSession, method: str, url: str, token: str, timeout_s: float, **kwargs: Any
) -> tuple[int, Any]:
    """Status and answer; an object when the status is 200. Raises NoAnswer."""
    try:
        async with http.request(
            method,
            url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            **kwargs,
        ) as response:
            status, answer = response.status, await response.json(content_type=None)
    except TimeoutError:
        raise NoAnswer(f"no answer from {url} within {timeout_s:g} s") from None
    except (aiohttp.ClientError, ValueError) as e:
        raise NoAnswer(f"{url}: {type(e).__name__}: {e}") from e
    if status == 200 and not isinstance(answer, dict):
        raise NoAnswer(f"{url}: answer not understood: {answer!r:.200}")
    return status, answer
