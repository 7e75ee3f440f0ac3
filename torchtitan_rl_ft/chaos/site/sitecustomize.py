"""Waits for torchft's process groups to be imported, and lets sums over the groups fail on demand.

Runs in each Python process of the job, also in those that have another environment, so it needs
the standard library alone; a trainer, which imports torchft, has this package.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

TARGET = "torchft.process_group"
HERE = os.path.dirname(os.path.abspath(__file__))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module where all others would, with a loader that wraps what it has loaded."""

    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)  # once; and the others are asked
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                from torchtitan_rl_ft.chaos.failing_reduce import wrap

                wrap(module)

            spec.loader.exec_module = exec_module
        return spec


def run_next():
    """The `sitecustomize` that would have run without this one."""
    others = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Finder())
run_next()
