"""A folder for PYTHONPATH: what lies here runs at the start of each Python process of a job whose
plan asks for it (`failing_reduce.put_before`)."""
