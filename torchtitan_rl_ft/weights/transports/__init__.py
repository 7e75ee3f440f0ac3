"""How a published policy reaches the node of an engine."""
