"""RL post-training on TorchTitan that does not stop when machines do."""

__version__ = "0.1.0"
