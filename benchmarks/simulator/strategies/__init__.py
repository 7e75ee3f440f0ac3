"""How a job answers faults: ours by our own decisions, others by models of what is published."""
