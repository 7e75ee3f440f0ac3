"""The trial push: it has a limit, whatever the library does."""

import sys
import time

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.transports import probe as probe_module
from torchtitan_rl_ft.weights.transports.probe import probe


def run_by(program, tmp_path, monkeypatch):
    """Both sides are this shell program."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(probe_module, "nixl_version", lambda: "nixl 1")


def test_a_library_that_hangs_as_it_is_loaded_is_given_up(tmp_path, monkeypatch):
    run_by("exec sleep 600", tmp_path, monkeypatch)
    began_s = time.monotonic()
    found = probe(WeightsSection(), limit_s=0.3)
    assert time.monotonic() - began_s < 30
    assert found.problem is not None and "did not end within 0.3 s" in found.problem
    assert "weights.ucx_devices = 'lo'" in found.problem


def test_a_push_that_hangs_is_given_up(tmp_path, monkeypatch):
    offer = '{"agent": "", "address": 0, "ucx": "1.20"}'
    run_by(f"echo '{offer}'\nexec sleep 600", tmp_path, monkeypatch)
    found = probe(WeightsSection(), limit_s=0.3)
    assert found.problem is not None and "did not end within 0.3 s" in found.problem
    assert found.ucx == "1.20"


def test_a_side_that_ends_says_why(tmp_path, monkeypatch):
    run_by("echo 'no such device' >&2\nexit 1", tmp_path, monkeypatch)
    problem = probe(WeightsSection()).problem
    assert problem is not None and problem.endswith("no such device")
