"""What a model is made to say, and the results of files of requests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm import LLM
from nanovllm.cli.jobs.run_batch import BatchFiles, run_batch


def script(ids: list[int]) -> Callable[..., Any]:
    """A logits processor that makes the model say these tokens."""

    def force(output: list[int], logits: Any) -> Any:
        logits[ids[len(output)]] = float("inf")
        return logits

    return force


def run_bodies(llm: LLM, path: Path, bodies: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The results of pairs (url, body) in a file, in their order."""
    lines = [{"custom_id": str(i), "url": u, "body": b} for i, (u, b) in enumerate(bodies)]
    (path / "in").write_text("\n".join(map(json.dumps, lines)))
    run_batch(llm, BatchFiles(path / "in", path / "out"), trust_chat_templates=True)
    results = [json.loads(line) for line in (path / "out").read_text().splitlines()]
    return sorted(results, key=lambda result: int(result["custom_id"]))
