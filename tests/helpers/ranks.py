"""Runs jobs on several ranks; test_parallel.py asks for them.

    python tests/helpers/ranks.py    reads (job, ranks, arguments) from stdin, writes to stdout

torch is imported once. Each rank is forked from here, with the environment that torchrun sets; and
unlike torchrun nothing ends the others if one of them fails.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast  # noqa: F401 (imported once)

from nanovllm import LLM, SamplingParams, Trace
from nanovllm.loading.memory import MemoryBudget
from nanovllm.sampling_params import BeamSearchParams

with suppress(ImportError):  # without Numba
    import nanovllm.backends.cpu.backend  # noqa: F401

# Seconds for a job, and fewer than those of Ranks.TIMEOUT: a job in which a rank waits for one that
# has failed is ended, and has no result.
LIMIT = 150
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(path: str, **options: Any) -> LLM:
    """An engine with as many ranks as there are processes, and a pool that is too small."""
    size = int(os.environ["WORLD_SIZE"])
    settings = dict(device="cpu", dtype="float32", attention_backend="sdpa", max_num_seqs=8)
    settings |= dict(block_size=4, num_kv_cache_blocks=24, max_num_batched_tokens=24)
    return LLM(
        path, **settings | {"skip_tokenizer_init": True, "tensor_parallel_size": size} | options
    )


def some_prompts(number: int = 6) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 180 + 1 for j in range(5 + 6 * i)] for i in range(number)]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def everything(path: str, **options: Any) -> dict[str, Any]:
    """What every kind of request returns: "tokens" are to be equal, "numbers" close."""
    llm, prompts = make(path, **options), some_prompts()
    with Trace(llm) as trace:
        greedy = llm.generate(prompts, GREEDY.clone(), use_tqdm=True)
    scored = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    logprobs = llm.generate(prompts[:3], scored, use_tqdm=False)
    sampled = SamplingParams(
        n=2, temperature=0.9, top_p=0.9, seed=5, max_tokens=8, presence_penalty=0.5
    )
    forks = llm.generate(prompts[:4], sampled, use_tqdm=False)
    likely = llm.loglikelihood(prompts[:2], [[5, 6, 7], [8]], use_tqdm=False)
    beams = llm.beam_search(prompts[:2], BeamSearchParams(3, 6, ignore_eos=True), use_tqdm=False)
    embeddings = llm.embed(prompts[:3], use_tqdm=False)
    llm.reset_prefix_cache()
    streamed = [t for out in llm.stream(prompts[:2], GREEDY) for t in out.token_ids]
    known = [
        position[token].logprob
        for output in logprobs
        for token, position in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        )
    ]
    chosen = [
        entry.logprob
        for output in logprobs
        for position in output.outputs[0].logprobs
        for entry in position.values()
    ]
    return {
        "tokens": {
            "greedy": tokens_of(greedy),
            "scored": tokens_of(logprobs),
            "forks": tokens_of(forks),
            "beams": [s.tokens for out in beams for s in out.sequences],
            "stream": streamed,
        },
        "numbers": {
            "logprobs": chosen,
            "prompt_logprobs": known,
            "loglikelihoods": [out.logprob for out in likely],
            "embeddings": [x for out in embeddings for x in out.outputs.embedding],
        },
        "stats": {k: v for k, v in llm.stats().items() if "rate" not in k},
        "steps": str(trace).count("\n"),
    }


def hand_overs(path: str, new: str, backend: str) -> list[list[list[int]]]:
    """The tokens of the old weights, then of the new ones from each source and after sleep."""
    llm = make(path, attention_backend=backend)

    def answer() -> list[list[int]]:
        return tokens_of(llm.generate(some_prompts(4), GREEDY, use_tqdm=False))

    found = [answer()]
    weights = load_file(Path(new, "model.safetensors"))
    for source in (weights, iter(weights.items()), new):
        llm.load_weights(source)
        found.append(answer())
        llm.load_weights(path)
    assert answer() == found[0]
    for level in (1, 2):
        llm.load_weights(new)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.load_weights(new)
        found.append(answer())
    failed = outcome(lambda: llm.load_weights(iter([*weights.items()][1:])))
    assert "missing: " in failed
    assert "incomplete" in outcome(answer)
    llm.load_weights(weights)
    return [*found, answer()]


def greedy(path: str, **options: Any) -> list[list[int]]:
    return tokens_of(make(path, **options).generate(some_prompts(3), GREEDY, use_tqdm=False))


def with_a_fault(path: str, fault: str) -> dict[str, Any]:
    """Decode steps are captured by the stand-in of graphs.py, with a fault on the last rank: it
    cannot "capture", or its replay differs.
    """
    from graphs import capture_with, stand_in

    def faulty(decode: Any, positions: Any, min_over_ranks: Any) -> Any:
        sizes: list[int] = []

        def decode_once(rows: torch.Tensor, order: torch.Tensor) -> Any:
            results = decode(rows, order)
            sizes.append(len(rows))
            if fault == "capture" and len(sizes) == 3:
                raise RuntimeError("no graph")
            return results

        if os.environ["RANK"] == "0":
            return stand_in(decode, positions, min_over_ranks)
        graphs = stand_in(decode_once, positions, min_over_ranks)
        if fault == "replay":
            replay = graphs.replay

            def other_tokens(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
                hidden, tokens = replay(rows)
                return hidden, tokens * 0

            graphs.replay = other_tokens  # type: ignore[method-assign]
        return graphs

    capture_with(pytest.MonkeyPatch(), faulty)
    llm = make(path, async_scheduling=True, max_model_len=64)
    tokens = tokens_of(llm.generate(some_prompts(3), GREEDY, use_tqdm=False))
    graphs = llm.engine.runner.graphs  # type: ignore[attr-defined]
    return {"tokens": tokens, "sizes": graphs and [*graphs.replays]}


def text(with_drafts: bool = False, **options: Any) -> list[tuple[str, str | None]]:
    """The embedded model, with its tokenizer and stop strings."""
    options["speculative_config"] = {"prompt_lookup_min": 1} if with_drafts else None
    llm = make("qwen3-nano", skip_tokenizer_init=False, num_kv_cache_blocks=100, **options)
    questions = ["What is 12 + 30?", "Sort: 5 3 9", "What is a KV block?", "Count from 1 to 12."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40, stop=[", 7", "block"])
    outputs = llm.chat(chats, params, use_tqdm=False)
    assert (llm.stats().get("accepted_tokens", 0) > 0) == with_drafts
    return [(out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs]


def bytes_of_a_step(path: str) -> dict[str, list[int]]:
    """The bytes that each collective call of a decode of 3 rows gets."""
    llm, seen = make(path), {"all_reduce": [], "all_gather": [], "agree": []}
    dist = torch.distributed
    for name in ("all_reduce", "all_gather"):
        call = getattr(dist, name)

        def counted(*args: Any, name: str = name, call: Any = call, **kwargs: Any) -> None:
            x = args[1] if name == "all_gather" else args[0]
            kind = "agree" if x.dtype is torch.int64 else name
            seen[kind].append(x.nbytes)
            call(*args, **kwargs)

        setattr(dist, name, counted)
    for prompt in some_prompts(3):
        llm.engine.add_request(prompt, GREEDY)
    while llm.engine.scheduler.waiting or any(not s.decoding for s in llm.engine.scheduler.running):
        llm.engine.step()
    for sizes in seen.values():
        sizes.clear()
    llm.engine.step()
    return seen


def outcome(action: Callable[[], Any]) -> str:
    try:
        return f"no error: {action()}"
    except (RuntimeError, ValueError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def rank() -> int:
    return int(os.environ["RANK"])


def tell(what: str) -> None:
    """End the `wait_until` of other ranks."""
    Path(os.environ["FOLDER"], what).touch()


def wait_until(what: str) -> None:
    while not Path(os.environ["FOLDER"], what).exists():
        time.sleep(0.01)


def other_prompts(path: str) -> tuple[str, list[list[int]]]:
    llm = make(path)
    prompts = [[1, 2, 3], [4, 5 + rank()]]
    failed = outcome(lambda: llm.generate(prompts, GREEDY, use_tqdm=False))
    return failed, tokens_of(llm.generate(some_prompts(2), GREEDY, use_tqdm=False))


def other_parameters(path: str) -> str:
    llm, params = make(path), SamplingParams(temperature=1.0, seed=rank(), max_tokens=4)
    return outcome(lambda: llm.generate([[1, 2, 3]], params, use_tqdm=False))


def other_options(path: str) -> str:
    return outcome(lambda: make(path, seed=rank()))


def other_tokens(path: str) -> tuple[str, list[list[int]]]:
    """Nothing but the sampled tokens differs, which a decode's plan does not contain."""
    llm = make(path)
    backend = llm.engine.runner.backend
    sample = backend.sample
    if rank() == 1:
        changed = lambda logits, batch: sample(logits.roll(1, dims=1), batch)  # noqa: E731
        vars(backend)["sample"] = changed
    failed = outcome(lambda: llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False))
    vars(backend).pop("sample", None)
    return failed, tokens_of(llm.generate(some_prompts(2), GREEDY, use_tqdm=False))


def an_abort(path: str) -> str:
    """Only rank 1 aborts a request."""
    engine = make(path).engine
    for i, prompt in enumerate(some_prompts(3)):
        engine.add_request(prompt, GREEDY, str(i))

    def run() -> None:
        for number in range(20):
            if (number, rank()) == (6, 1):
                engine.abort_request("1")
            engine.step()

    return outcome(run)


def in_a_layer(llm: LLM, number: int, action: Callable[[], Any]) -> None:
    """Let this rank do something in the middle of a step, before so many linear layers."""
    layers = llm.engine.runner.model.layers
    linear, calls = layers[0].self_attn.qkv_proj, iter(range(10**6))
    call = linear.backend.linear

    def counted(x: Any, module: Any) -> Any:
        if next(calls) == number:
            action()
        return call(x, module)

    vars(linear.backend)["linear"] = counted


def a_failing_rank(path: str) -> tuple[str, str]:
    """Rank 1 fails in the middle of a step, and lives on until rank 0 has failed."""
    llm = make(path)
    if rank() == 1:
        in_a_layer(llm, 33, lambda: 1 / 0)
    try:
        failed = outcome(lambda: llm.generate(some_prompts(3), GREEDY, use_tqdm=False))
    except ZeroDivisionError as error:
        failed = f"ZeroDivisionError: {error}"
    again = outcome(lambda: llm.generate([[1]], GREEDY, use_tqdm=False))
    if rank() == 0:
        tell("rank 0 has failed")
    wait_until("rank 0 has failed")
    return failed, again


def a_killed_rank(path: str) -> str:
    llm = make(path)
    if rank() == 1:
        in_a_layer(llm, 33, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return outcome(lambda: llm.generate(some_prompts(3), GREEDY, use_tqdm=False))


def ctrl_c(path: str) -> str:
    """In rank 1, whose script ends with it."""
    llm = make(path)
    if rank() == 1:
        in_a_layer(llm, 33, lambda: signal.raise_signal(signal.SIGINT))
    failed = outcome(lambda: llm.generate(some_prompts(3), GREEDY, use_tqdm=False))
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0
    return failed


def a_slow_rank(path: str) -> str:
    """Rank 1 does nothing until rank 0 has failed, which waits for a second."""
    llm, call = make(path), lambda: llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    if rank() == 0:
        group = llm.engine.runner.ranks.host
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        failed = outcome(call)
        tell("rank 0 has failed")
        return failed
    # The thread that would see that rank 0 has left gets little time before this thread sends.
    for thread in Path("/proc/self/task").glob("*"):
        if "gloo_tcp" in (thread / "comm").read_text():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(int(thread.name), {min(os.sched_getaffinity(0))})
    while not Path(os.environ["FOLDER"], "rank 0 has failed").exists():
        pass
    return outcome(call)


def fewest_blocks(path: str) -> int:
    """Each rank finds room for another number."""
    found = MemoryBudget.num_kv_blocks
    MemoryBudget.num_kv_blocks = lambda *args: found(*args) - 10 * rank()  # type: ignore[method-assign]
    llm = make(path, num_kv_cache_blocks=None, kv_cache_memory_bytes=10**6)
    return llm.engine.runner.num_blocks


def engines_in_turn(path: str) -> list[tuple[list[list[int]], int]]:
    """What each of three engines answers, and how many groups there are once it is deleted."""
    found = []
    for _ in range(3):
        answer = tokens_of(make(path).generate(some_prompts(3), GREEDY, use_tqdm=False))
        found.append((answer, len(torch.distributed.distributed_c10d._world.pg_map)))
    return found


# ---- the processes ----


def run(name: str, size: int, *arguments: tuple[str, Any]) -> list[dict[str, Any]]:
    """What each rank returned or raised, printed, and how it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        start, found = time.monotonic(), []
        job = name, size, dict(arguments), port, Path(folder)
        running = {fork(*job, i): i for i in range(size)}
        ends: dict[int, int] = {}
        while running:
            for process in [*running]:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    ends[running.pop(process)] = status
                elif time.monotonic() - start > LIMIT:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        for i in range(size):
            result, log = Path(folder, f"{i}.pickle"), Path(folder, f"{i}.log")
            found.append(pickle.loads(result.read_bytes()) if result.exists() else {})
            found[-1] |= {"status": ends[i], "log": log.read_text()}
    return found


def fork(name: str, size: int, arguments: Any, port: int, folder: Path, index: int) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        log = os.open(folder / f"{index}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["FOLDER"] = str(folder)
        try:
            found = {"value": globals()[name](**arguments)}
            status = 0
        except BaseException as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"{index}.pickle").write_bytes(pickle.dumps(found))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    while True:
        try:
            asked = pickle.load(requests)
        except EOFError:
            os._exit(0)  # the end of torch takes long
        pickle.dump(run(*asked), answers)
        answers.flush()


if __name__ == "__main__":
    main()
