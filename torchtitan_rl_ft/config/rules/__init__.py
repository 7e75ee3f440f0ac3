"""Rules between the keys of a job, by subject. Each is a function that yields what is wrong."""
