"""What an engine has to show before it may serve a version: the checksums of its parameters.

For known model families without tensor parallelism the checksums follow from the published
bytes, and every parameter is compared (`exact`). Else they cannot be computed here: then all
engines must agree on the release, and an engine must show other checksums than before the load
when the release has another content (`witness`). That catches a lost, stale or torn update of
one engine; it cannot catch one that all engines make alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.weights.dtype_casts import ENGINE_DTYPES, CastUnknown, cast
from torchtitan_rl_ft.weights.engine_hashes import EngineHash
from torchtitan_rl_ft.weights.engine_parameters import (
    Parameter,
    engine_parameters,
    known_family,
)
from torchtitan_rl_ft.weights.manifest import (
    FolderTensors,
    Manifest,
    WeightsInvalid,
    open_tensors,
    read_and_verify,
    read_manifest,
)

_THREADS = 8

Checksums = Sequence[Mapping[str, str]]
"""Parameter -> checksum, for each rank of an engine."""


@dataclass(frozen=True)
class EngineLayout:
    """How the engines hold weights. `dtype` is SGLang's --dtype."""

    dtype: str
    ranks: int
    hash: EngineHash


class Proof:
    """Judges the checksums of engines that claim to hold one release."""

    def __init__(self, model_digest: str, exact: dict[str, str] | None) -> None:
        self.model_digest = model_digest
        self._exact = exact
        self._witness: Checksums | None = None

    @property
    def kind(self) -> str:
        return "exact" if self._exact is not None else "witness"

    @property
    def settled(self) -> bool:
        """Whether it is known what an engine has to show."""
        return self._exact is not None or self._witness is not None

    def problem(self, shown: Checksums, before: Checksums, digest_before: str | None) -> str | None:
        """Why the engine may not serve, or None.

        `before` are the checksums that it showed before the load, `digest_before` the
        model_digest of the release that it held then, None for weights of unknown content.
        """
        if self._exact is not None:
            return _difference(self._exact, shown[0], "the published weights imply")
        if self._witness is not None:
            for rank, (known, found) in enumerate(zip(self._witness, shown, strict=True)):
                if found != known:
                    return _difference(known, found, f"another engine holds at rank {rank}")
        elif digest_before not in (None, self.model_digest) and list(shown) == list(before):
            return "all checksums are those from before the update"
        self._witness = shown
        return None


def make_proofs(
    path: Path, layouts: Iterable[EngineLayout]
) -> tuple[Manifest, dict[EngineLayout, Proof]]:
    """Verify a published folder byte by byte and derive what engines of each layout have to show.

    Verified last: bytes that are damaged before or meanwhile are found, so no proof is of them,
    which would have every engine refused that loads the right ones.

    Reads all weights: run it in a thread. Raises WeightsInvalid, OSError.
    """
    manifest = read_manifest(path)
    proofs = {layout: derive_proof(path, manifest, layout) for layout in set(layouts)}
    if read_and_verify(path, finite=True) != manifest:
        raise WeightsInvalid(f"{path} was replaced while it was read")
    return manifest, proofs


def derive_proof(path: Path, manifest: Manifest, layout: EngineLayout) -> Proof:
    """The proof of a folder that holds what its manifest says. Reads all weights. Raises
    WeightsInvalid, OSError."""
    config = json.loads((path / "config.json").read_bytes())
    exact = None
    if known_family(config) and layout.ranks == 1:
        try:
            exact = _exact(path, manifest, config, layout)
        except CastUnknown:
            exact = None
    return Proof(manifest.model_digest, exact)


def _exact(
    path: Path, manifest: Manifest, config: Mapping[str, Any], layout: EngineLayout
) -> dict[str, str]:
    shapes = {name: t.shape for name, t in manifest.tensors.items()}
    parameters = engine_parameters(shapes, config)
    with open_tensors(path, manifest) as tensors, ThreadPoolExecutor(_THREADS) as threads:
        hashes = threads.map(lambda p: _hash(p, manifest, tensors, layout), parameters.values())
        return dict(zip(parameters, hashes, strict=True))


def _hash(
    parameter: Parameter, manifest: Manifest, tensors: FolderTensors, layout: EngineLayout
) -> str:
    target = ENGINE_DTYPES.get(layout.dtype)
    if target is None:
        raise CastUnknown(f"dtype {layout.dtype}")
    chunks = [cast(tensors.raw(n), manifest.tensors[n].dtype, target) for n in parameter.parts]
    if parameter.zero_rows:
        first = manifest.tensors[parameter.parts[0]]
        row_bytes = memoryview(chunks[0]).nbytes // first.shape[0]
        chunks.append(bytes(parameter.zero_rows * row_bytes))
    return layout.hash(chunks)


def _difference(expected: Mapping[str, str], found: Mapping[str, str], source: str) -> str | None:
    names = [n for n in expected if found.get(n) != expected[n]]
    if names:
        name = names[0]
        return (
            f"{len(names)} of {len(expected)} parameters differ; {name}: the engine shows "
            f"{found.get(name)}, {source} {expected[name]}"
        )
    extra = sorted(set(found) - set(expected))
    if extra:
        return f"the engine has a parameter that nothing accounts for: {extra[0]}"
    return None
