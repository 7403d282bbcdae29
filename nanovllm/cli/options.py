"""The options of commands that load a model."""

import argparse
import ast
from typing import Any

from nanovllm.config import EMBEDDED


def add_model_options(parser: argparse.ArgumentParser) -> None:
    model = f"a directory, hub id or smollm2-135m ({EMBEDDED})"
    parser.add_argument("--model", default=EMBEDDED, help=model)
    pair: dict[str, Any] = {"type": option, "action": "append", "default": []}
    value = "an option of LLM(), like max_num_seqs=16"
    parser.add_argument("--set", **pair, metavar="OPTION=VALUE", help=value)


def option(text: str) -> tuple[str, Any]:
    """Parse OPTION=VALUE of a command line. VALUE is a Python literal, or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: give OPTION=VALUE, like max_num_seqs=16")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
