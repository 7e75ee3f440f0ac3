"""Generation by the serving role: requests, answers checked, failures told apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from torchtitan_rl_ft.journal.partials import Piece
from torchtitan_rl_ft.rollout.sample_times import Leg

GRACE_S = 10.0
"""Beyond a request's own limit, for the answer to travel."""

CHECK_GRACE_S = 1.0

PROFILE_TIMEOUT_S = 180.0
"""For all engines to begin, or to write their traces."""

UNAVAILABLE_RETRY_S = 0.5
"""A serving role that was killed is back with its engines after 1 to 2 s: nobody sleeps longer."""

FINISHED = ("stop", "length")
SEED_BITS = 31


class ServingUnavailable(Exception):
    """Serving is not there or has no engine: no prompt is to blame, try again."""


class GenerationFailed(Exception):
    """Serving answered, but not with usable samples of this prompt."""


Keep = Callable[[Sequence[Piece]], None]

LINES = "application/x-ndjson"


@dataclass(frozen=True)
class HeldSample:
    """What there is of a sample. The lists have one length."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str | None = None


@dataclass(frozen=True)
class GenerateRequest:
    request_id: str
    input_ids: Sequence[int]
    n: int
    sampling: Mapping[str, Any]  # SGLang's names
    seeds: Sequence[int] | None  # one for each sample
    timeout_s: float
    held: Sequence[HeldSample] = ()
    """What there is of each sample already, or nothing."""

    partial_interval_tokens: int = 0
    """`keep` is told before it lacks so many tokens of a sample. 0: not at all."""

    trace: bool = False
    """The answer says when which engine worked on each sample."""


@dataclass(frozen=True)
class Generated:
    """One sample: per-token log-probs and policy versions, as long as `output_ids`."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    min_version: int
    max_version: int
    legs: Sequence[Leg] = ()
    """Which engine worked on it when, for a request that is traced."""


@dataclass(frozen=True)
class ServedPolicy:
    """The newest policy that an engine serves."""

    version: int
    step: int
    token: str


class Generator(Protocol):
    """What the rollout loop needs of serving."""

    async def generate(
        self, request: GenerateRequest, keep: Keep = lambda pieces: None
    ) -> list[Generated]:
        """`keep` is given what comes of unfinished samples, and is called no more once this has
        returned. Raises ServingUnavailable, GenerationFailed."""
        ...

    async def policy(self, after: int, timeout_s: float) -> ServedPolicy | None:
        """Wait for a policy newer than version `after`; None when there is none in time.
        Raises ServingUnavailable."""
        ...


def sample_seed(run_seed: int, epoch: int, index: int, sample: int) -> int:
    """Sampling seed of one sample: other for each visit of a prompt, equal on a retry."""
    text = f"{run_seed}|{epoch}|{index}|{sample}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> (32 - SEED_BITS)


class ServingClient:
    """Generator over the serving role's HTTP routes.

    `find_url` is asked anew for each request: a restarted role has another port.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        find_url: Callable[[], str | None],
        token: str,
        on_awaited: Callable[[str], None] | None = None,
    ) -> None:
        """`on_awaited` is told the job whose first publish serving waits for, while it does."""
        self._session, self._find_url, self._on_awaited = session, find_url, on_awaited
        self._headers = {"Authorization": f"Bearer {token}"}

    async def generate(
        self, request: GenerateRequest, keep: Keep = lambda pieces: None
    ) -> list[Generated]:
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "input_ids": list(request.input_ids),
            "n": request.n,
            "sampling": dict(request.sampling),
            "seeds": None if request.seeds is None else list(request.seeds),
            "timeout_s": request.timeout_s,
        }
        if request.partial_interval_tokens:
            body["partial_interval_tokens"] = request.partial_interval_tokens
        if request.trace:
            body["trace"] = True
        if request.held:
            body["held"] = [asdict(h) for h in request.held]
        answer = await self._request(
            "POST", "/v1/generate", keep, timeout_s=request.timeout_s + GRACE_S, json=body
        )
        return checked_samples(answer, request.n)

    async def policy(self, after: int, timeout_s: float) -> ServedPolicy | None:
        params = {"after": str(after), "timeout_s": str(timeout_s)}
        try:
            answer = await self._request(
                "GET", "/v1/version", timeout_s=timeout_s + GRACE_S, params=params
            )
        except GenerationFailed as e:
            raise ServingUnavailable(str(e)) from e
        if self._on_awaited is not None and (awaited := answer.get("awaits_publish")):
            self._on_awaited(awaited)
        if answer.get("version") is None or not answer.get("serving"):
            return None
        if int(answer["version"]) <= after:
            return None
        return ServedPolicy(int(answer["version"]), int(answer["step"]), str(answer["token"]))

    async def check(self, timeout_s: float) -> list[int]:
        """Have serving probe its engines; slots of those found dead. Raises ServingUnavailable,
        GenerationFailed."""
        answer = await self._request(
            "POST", "/v1/check", timeout_s=timeout_s + CHECK_GRACE_S, json={"timeout_s": timeout_s}
        )
        return [int(slot) for slot in answer["retired"]]

    async def release(self, timeout_s: float) -> list[int]:
        """Have colocated engines give their memory up; their slots. Raises ServingUnavailable,
        GenerationFailed."""
        body = {"timeout_s": timeout_s}
        answer = await self._request(
            "POST", "/v1/release", timeout_s=timeout_s + GRACE_S, json=body
        )
        return [int(slot) for slot in answer["released"]]

    async def profile(self, action: str, folder: Path) -> list[int]:
        """Start or stop the engines' profilers; the slots that did. Raises ServingUnavailable,
        GenerationFailed."""
        body = {"action": action, "folder": str(folder)}
        answer = await self._request("POST", "/v1/profile", timeout_s=PROFILE_TIMEOUT_S, json=body)
        return [int(slot) for slot in answer["slots"]]

    async def publish(
        self, step: int, token: str, path: Path, manifest_digest: str, timeout_s: float
    ) -> int:
        """Announce weights; the version that serving gave them. Raises ServingUnavailable,
        GenerationFailed."""
        body = {
            "step": step,
            "token": token,
            "path": str(path),
            "manifest_digest": manifest_digest,
            "wait": "none",
            "deadline_s": timeout_s,
        }
        answer = await self._request(
            "POST", "/v1/publish", timeout_s=timeout_s + GRACE_S, json=body
        )
        return int(answer["version"])

    async def _request(
        self,
        method: str,
        path: str,
        keep: Keep = lambda pieces: None,
        *,
        timeout_s: float,
        **kwargs: Any,
    ) -> Any:
        url = self._find_url()
        if url is None:
            raise ServingUnavailable("the serving role has not come up")
        started = time.monotonic()
        try:
            async with self._session.request(
                method,
                url + path,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                **kwargs,
            ) as response:
                if response.content_type == LINES:
                    status, text, answer = await _last_line(response, keep)
                else:
                    status, text = response.status, await response.text()
                    answer = await response.json() if response.ok else None
        except TimeoutError as e:
            waited_s = time.monotonic() - started
            raise GenerationFailed(f"no answer from {path} within {waited_s:.0f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise ServingUnavailable(f"{path}: {type(e).__name__}: {e}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise GenerationFailed(f"{path}: the answer is not understood: {e}") from e
        if status == 503:
            raise ServingUnavailable(f"{path}: {text[:200]}")
        if status != 200:
            raise GenerationFailed(f"{path}: status {status}: {text[:200]}")
        return answer


async def _last_line(response: aiohttp.ClientResponse, keep: Keep) -> tuple[int, str, Any]:
    """(status, error, answer) of an answer in lines; `keep` is given the others as they come.
    Raises aiohttp.ClientError when it breaks off."""
    parts: list[bytes] = []
    async for data in response.content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            said = json.loads(b"".join([*parts, end]))
            parts.clear()
            if "partial" not in said:
                return int(said.get("status", response.status)), str(said.get("error")), said
            keep([_piece(p) for p in said["partial"]])
        parts.append(rest)
    raise aiohttp.ClientPayloadError("the answer broke off")


def _piece(said: Mapping[str, Any]) -> Piece:
    """Raises KeyError, TypeError, ValueError."""
    ids = [int(i) for i in said["output_ids"]]
    logprobs, versions = [float(x) for x in said["logprobs"]], [int(v) for v in said["versions"]]
    if not len(ids) == len(logprobs) == len(versions):
        raise ValueError("the lists of an unfinished sample differ in length")
    return Piece(
        int(said["index"]), int(said["start"]), ids, logprobs, versions, said["finish_reason"]
    )


def checked_samples(answer: Mapping[str, Any], n: int) -> list[Generated]:
    """The samples of a generate answer. Raises GenerationFailed when one is unfit to train on."""
    samples = answer.get("samples")
    if not isinstance(samples, list) or len(samples) != n:
        got = len(samples) if isinstance(samples, list) else "no list of"
        raise GenerationFailed(f"asked for {n} samples, got {got}")
    return [_checked(sample) for sample in samples]


def _checked(sample: Mapping[str, Any]) -> Generated:
    try:
        ids, logprobs, versions = sample["output_ids"], sample["logprobs"], sample["versions"]
        reason, lowest = sample["finish_reason"], sample["min_version"]
        highest = sample["max_version"]
    except (KeyError, TypeError) as e:
        raise GenerationFailed(f"a sample lacks {e}") from e
    if versions is None or lowest is None:
        raise GenerationFailed("a sample is of a frozen group, not of the policy")
    if reason not in FINISHED:
        raise GenerationFailed(f"a sample ended with {reason!r}")
    if not len(ids) == len(logprobs) == len(versions):
        raise GenerationFailed(
            f"a sample has {len(ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions"
        )
    if not all(
        isinstance(v, int) and not isinstance(v, bool) for v in [*versions, lowest, highest]
    ):
        raise GenerationFailed("a sample does not name its policy version by number")
    if min([*versions, lowest]) < 1:
        raise GenerationFailed("a sample has version 0: versions of the policy count from 1")
    floats = [float("nan") if x is None else float(x) for x in logprobs]
    legs = sample.get("legs") or ()
    return Generated([int(i) for i in ids], floats, list(versions), reason, lowest, highest, legs)


async def pause(attempt: int, *, first_s: float = 0.2, longest_s: float = 5.0) -> None:
    """Sleep before try number `attempt` + 1, twice as long each time."""
    await asyncio.sleep(min(first_s * 2 ** min(attempt, 20), longest_s))
