"""Parts of `benchmarks/weight_sync.py`: ways to bring weights from one process to several."""
