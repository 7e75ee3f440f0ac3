"""Holders: processes that keep policy versions in shared memory and push them to one another."""
