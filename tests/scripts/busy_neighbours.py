"""The speed of an engine on a CPU beside, before and after processes that use its cores.

    python tests/scripts/busy_neighbours.py [ROUNDS]

A call of `generate` decodes 8 sequences at Qwen3-0.6B's shape. Each row of the table is one kind of
neighbours: one or two processes in an endless loop, of the same or of a low priority. Its figures
are the speed as a share of that of a call without neighbours just before it, medians over ROUNDS
(1; 3 minutes for each):

    beside         of a call beside them
    ended before   of a call that begins 0.5 s after their end; they ran for 5 s
    after the end  they end in the middle of a call; its speed from 0.5 s later on
    after a start  they start in the middle of a call; its speed from 0.5 s later on
    others         cores that other processes used during the calls without neighbours: the table
                   tells something if this is small

Beside neighbours of the same priority, compare with the speed of one thread, which the first line
says: it uses the core that one neighbour leaves, and a part of a core beside two.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanovllm import LLM, SamplingParams
from tools.benchmarks import workloads

STEPS, SEQUENCES = 40, 8


class Call:
    """A call of `generate`, with the time of each step."""

    def __init__(self, llm: LLM, steps: int = STEPS) -> None:
        params = SamplingParams(max_tokens=steps, ignore_eos=True, detokenize=False)
        prompts = [[7 * i + j for j in range(16)] for i in range(SEQUENCES)]
        llm.reset_prefix_cache()
        run, self.ends = llm.engine.runner.run, []

        def timed(plan):
            wait = run(plan)
            self.ends.append(time.monotonic())
            return wait

        llm.engine.runner.run = timed
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            del llm.engine.runner.run

    def rate(self, start: float = 0, end: float = float("inf")) -> float:
        """Tokens per second of the decodes between two times."""
        ends = [t for t in self.ends if start <= t <= end]
        return SEQUENCES * (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 2 else 0.0


class Neighbours:
    def __init__(self, count: int, nice: int) -> None:
        command = ["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"]
        self.started = time.monotonic()
        self.processes = [subprocess.Popen(command) for _ in range(count)]
        time.sleep(0.3)  # until they have started

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.ended = time.monotonic()


def busy_seconds() -> float:
    """What other processes used of the cores since the boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()


def measure(llm: LLM, count: int, nice: int) -> list[float]:
    others = []

    def alone() -> float:
        start, before = time.monotonic(), busy_seconds()
        rate = Call(llm).rate()
        others.append((busy_seconds() - before) / (time.monotonic() - start))
        return rate

    reference = alone()
    neighbours = Neighbours(count, nice)
    beside = Call(llm).rate() / reference
    neighbours.end()

    reference = alone()
    neighbours = Neighbours(count, nice)
    time.sleep(5)
    neighbours.end()
    time.sleep(0.5)
    ended_before = Call(llm).rate() / reference

    reference = alone()
    neighbours = Neighbours(count, nice)
    timer = threading.Timer(2, neighbours.end)
    timer.start()
    call = Call(llm, 3 * STEPS)
    timer.join()
    after_end = call.rate(neighbours.ended + 0.5) / reference

    reference, started = alone(), []
    timer = threading.Timer(1.5, lambda: started.append(Neighbours(count, nice)))
    timer.start()
    call = Call(llm, 3 * STEPS)
    timer.join()
    started[0].end()
    after_start = call.rate(started[0].started + 0.5) / reference
    return [beside, ended_before, after_end, after_start, max(others)]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = workloads.write_shape("qwen3-0.6b", Path(temporary))
        options = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu")
        llm = LLM(str(directory), dtype="bfloat16", attention_backend="numba", **options)
    Call(llm)
    both, threads = Call(llm).rate(), torch.get_num_threads()
    torch.set_num_threads(1)
    one = Call(llm).rate() / both
    torch.set_num_threads(threads)
    rounds = int(sys.argv[1]) if sys.argv[1:] else 1
    names = "beside", "ended before", "after the end", "after a start", "others"
    print(f"{threads} threads: {both:.0f} tokens/s; one thread: {one:.0%}")
    print(f"{'neighbours':12}" + "".join(f"{name:>15}" for name in names))
    for count in (1, 2):
        for nice in (0, 10, 19):
            rows = [measure(llm, count, nice) for _ in range(rounds)]
            figures = [median(column) for column in zip(*rows, strict=True)]
            cells = "".join(f"{figure:>15.0%}" for figure in figures[:-1])
            print(f"{f'{count}, nice {nice}':12}{cells}{figures[-1]:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
