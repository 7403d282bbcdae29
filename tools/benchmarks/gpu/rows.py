"""What a measurement yields: rows, which are dicts of strings and numbers.

A process prints each row as a line of JSON as soon as it is measured. report.py writes the line to
gpu-report.jsonl and `text` of it to gpu-report.txt.
"""

import importlib
import json
import math
from typing import Any

Row = dict[str, Any]
HEADLINE = "in the table"


def headline(row: Row) -> Row:
    """Mark a row that the table at the end of the report repeats."""
    return row | {HEADLINE: True}


def print_rows(module: str, options: dict[str, Any]) -> None:
    """Print what `rows` of a module of this folder yields, a line of JSON for each row."""
    for row in importlib.import_module(f"{__package__}.{module}").rows(**options):
        print(json.dumps({key: rounded(value) for key, value in row.items()}), flush=True)


def rounded(value: Any) -> Any:
    """Return a float with four digits, or None if it is NaN, for which JSON has no number."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.4g}")
    return value


def parse(line: str) -> Row | None:
    """Return the row that a line of a process's output holds, if any."""
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def text(row: Row) -> str:
    """Return strings as they are, and numbers after their name."""
    parts = []
    for key, value in row.items():
        if isinstance(value, str):
            parts.append(value)
        elif key != HEADLINE:
            number = "failed" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value}"
            parts.append(f"{key} {number}")
    return "  ".join(parts)
