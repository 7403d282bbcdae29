"""Imports optional modules of the package by name, when they are needed.

The folders backends, features, tools and lessons, or parts of them, can be deleted.
"""

import importlib
from typing import Any


def find_optional(module: str) -> Any:
    """Import a module, such as "backends.cpu.threads". Returns None if its folder is deleted.

    Raises ImportError if a package that the module needs is not installed.
    """
    name = f"nanovllm.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def load_optional(module: str, option: str) -> Any:
    """Import a module that `option` needs. Raises ValueError if its folder is deleted."""
    loaded = find_optional(module)
    if loaded is None:
        path = "nanovllm/" + module.replace(".", "/")
        raise ValueError(f"{option} needs {path}.py, which this copy of nanovllm does not have")
    return loaded
