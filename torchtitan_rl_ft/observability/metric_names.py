"""How a key of `metrics.jsonl` is called by Prometheus and OpenTelemetry."""

from __future__ import annotations

import re

PREFIX = "rl_ft_"


def exported_name(key: str) -> str:
    """`time/step_s` is `rl_ft_time_step_seconds`: base units in the name, in full."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", key)
    return PREFIX + re.sub(r"_s$", "_seconds", name)
