"""The score: the tasks, faults and questions that a reader has solved.

`python -m lessons --score` shows it. Its first call makes the file lessons.jsonl in the current
directory, in which they are recorded from then on. Without the file nothing is recorded.
"""

import json
from pathlib import Path

FILE = Path("lessons.jsonl")  # in the current directory; a JSON object in each line


def record(kind: str, name: str, tries: int = 0) -> None:
    """Append what was solved: a "task", "fault" or "question", and at which try, if that counts."""
    if FILE.exists():
        with FILE.open("a") as file:
            file.write(json.dumps({"kind": kind, "name": name, "tries": tries}) + "\n")


def read() -> dict[str, dict[str, int]]:
    """Return kind -> name -> tries. Of what was solved several times, the first time counts."""
    solved = dict[str, dict[str, int]]()
    for event in map(json.loads, FILE.read_text().splitlines()):
        solved.setdefault(event["kind"], {}).setdefault(event["name"], event["tries"])
    return solved


def show() -> None:
    if not FILE.exists():
        FILE.touch()
        print(f"{FILE.resolve()} is made. What you solve in this directory is recorded in it.")
    solved = read()
    print(f"tasks: {' '.join(solved.get('task', {})) or 'none'}")
    for kind in ("fault", "question"):
        tries = [*solved.get(kind, {}).values()]
        print(f"{kind}s: {len(tries)}, of which {tries.count(1)} at the first try")
