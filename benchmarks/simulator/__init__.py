"""Discrete-event simulator of RL post-training under faults; see docs/simulator.md."""
