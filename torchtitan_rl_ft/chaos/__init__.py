"""Fault injection from outside: processes killed, stopped and slowed, connections that go dead.

Imported by the command line, tests and benchmarks alone. No part of the product knows that it is
there: a victim is found like a stranger would find it, and stays registered.
"""
