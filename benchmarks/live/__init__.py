"""Parts of `benchmarks/ettr_live.py`: fault traces, arms, the driver of an arm, its accounts."""
