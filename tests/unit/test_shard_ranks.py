"""Four real ranks, sharded by FSDP, HSDP, TP and both: what they write is one whole image."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fakes" / "shard_ranks.py"
RANKS = 4
LAYOUTS = ("alone", "fsdp", "hsdp", "tp", "fsdp_tp", "beside_tp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, SCRIPT, path], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def told(folder):
    return [json.loads((folder / f"told.{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_write_the_whole_image_each_byte_once(folder, layout):
    whole = (folder / f"{layout}.whole").read_bytes()
    image, times = bytearray(len(whole)), bytearray(len(whole))
    shares = []
    for rank, said in enumerate(told(folder)):
        written = (folder / f"{layout}-1.{rank}").read_bytes()
        shares.append(sum(end - start for start, end in said["ranges"][layout]))
        for start, end in said["ranges"][layout]:
            image[start:end] = written[start:end]
            times[start:end] = bytes(n + 1 for n in times[start:end])
        assert said[f"version {layout}"] == len(whole)
    assert image == whole
    assert set(times) == {1}
    # The norm and the header are somebody's; the rest is shared evenly.
    assert max(shares) - min(shares) < 0.02 * len(whole)


@pytest.mark.row("I7")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("over", ["holders", "disk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_on_one_rank_is_refused_by_all(folder, layout, over):
    refused = {said.get(f"NaN {layout} {over}") for said in told(folder)}
    [why] = refused
    if over == "disk" and layout not in ("fsdp", "tp"):
        assert why is None  # the first rank has, or gathers, another copy of that shard
    else:
        assert "'model.up.weight' holds NaN" in why
