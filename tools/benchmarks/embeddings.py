"""Measures texts per second of LLM.embed and of sentence-transformers, in turns.

    python -m tools.benchmarks.embeddings --shape qwen3-0.6b --dtype bfloat16

Both load the same checkpoint. The texts are paragraphs about the engine, once alone and once after
a common instruction. The prefix cache is empty at the beginning of each turn.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.loading.checkpoint import find_checkpoint
from tools.benchmarks.machine import cpu_seconds, describe, describe_load, other_load
from tools.benchmarks.workloads import SHAPES, write_shape, write_weights
from tools.training.topics import TOPICS

INSTRUCTION = (
    "Instruct: Given a question about an inference engine, retrieve the passages that answer it\n"
    "Query:"
)
MODULES = [
    {
        "idx": i,
        "name": str(i),
        "path": f"{i}_{kind}" * (i > 0),
        "type": f"sentence_transformers.models.{kind}",
    }
    for i, kind in enumerate(("Transformer", "Pooling", "Normalize"))
]


def write_checkpoint(shape: str, parent: Path, dtype: torch.dtype) -> Path:
    """Write a sentence-transformers checkpoint with random weights. Returns its directory.

    The tokenizer is the embedded model's.
    """
    path = write_shape(shape, parent)
    write_weights(path, dtype)
    for file in find_checkpoint("qwen3-nano").glob("*token*"):
        shutil.copy(file, path)
    (path / "modules.json").write_text(json.dumps(MODULES))
    (path / "1_Pooling").mkdir()
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": size, "pooling_mode_lasttoken": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.embeddings")
    parser.add_argument("--shape", choices=SHAPES, default="cpu-small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--count", type=int, default=256, help="texts (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="of sentence-transformers")
    args = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    rng = random.Random(0)
    texts = []
    for _ in range(args.count):
        texts.append(" ".join(topic.text for topic in rng.sample(TOPICS, rng.randint(1, 4))))
    with tempfile.TemporaryDirectory() as parent:
        path = write_checkpoint(args.shape, Path(parent), getattr(torch, args.dtype))
        llm = LLM(path, dtype=args.dtype, enforce_eager=True)
        runner: Any = llm.engine.runner
        device = runner.device
        settings = {"dtype": getattr(torch, args.dtype)}
        theirs = SentenceTransformer(str(path), device=str(device), model_kwargs=settings)

    def ours(prompt: str) -> Any:
        llm.reset_prefix_cache()
        outputs = llm.embed([prompt + text for text in texts], use_tqdm=False)
        return [output.outputs.embedding for output in outputs]

    def peer(prompt: str) -> Any:
        return theirs.encode(texts, prompt=prompt, batch_size=args.batch_size).tolist()

    engines: dict[str, Callable[[str], Any]] = {"nanovllm": ours, "sentence-transformers": peer}
    print(*(f"{name}: {value}" for name, value in describe(device).items()), sep="\n")
    for title, prompt in (("texts alone", ""), ("after an instruction", INSTRUCTION)):
        lengths = [len(llm.engine.input_processor.encode(prompt + text)) for text in texts]
        times: dict[str, list[float]] = {name: [] for name in engines}
        load = cpu_seconds()
        for turn in range(args.repeats + 1):  # the first is not counted
            vectors = []
            for name, run in engines.items():
                start = time.perf_counter()
                vectors.append(torch.tensor(run(prompt)))
                if turn:
                    times[name].append(args.count / (time.perf_counter() - start))
        cosine = torch.cosine_similarity(vectors[0], vectors[1]).min()
        print(
            f"\n{title}: {args.count} of {min(lengths)} to {max(lengths)} tokens, cosine of the "
            f"two at least {cosine:.6f}, other processes {describe_load(other_load(load))}"
        )
        for name, rates in times.items():
            low, high = min(rates), max(rates)
            print(f"{name:24}{median(rates):10.1f} texts/s ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
