"""The simulator plans what an engine plans, counts hits as an LRU cache does, and names faults."""

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoints import random_llm

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.observer import Observer
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from tools.simulate import __main__ as command
from tools.simulate.clock import Roofline, Table
from tools.simulate.simulation import Simulation
from tools.simulate.traces import HASHED, alone, make_chat, read_trace


class Plans(Observer):
    """Records what a plan computes where, without the tokens."""

    def __init__(self) -> None:
        self.steps: list[object] = []

    def scheduled(self, step: InFlightStep | None) -> None:
        if step is not None:
            plan = step.plan
            chunks = [(c.row, c.start, len(c.token_ids), c.result_kind) for c in plan.chunks]
            rows = [(new.row, new.block_table) for new in plan.new_rows]
            self.steps.append((chunks, rows, plan.new_blocks, plan.decode_rows))


@pytest.mark.parametrize("ahead", [False, True])
def test_plans_are_those_of_an_engine(path: Path, ahead: bool) -> None:
    """With chunks, requests that wait, and preemptions."""
    options = dict(num_kv_cache_blocks=12, block_size=4, max_num_seqs=5, max_num_batched_tokens=8)
    llm = random_llm(path, attention_backend="sdpa", async_scheduling=ahead, **options)
    sizes = [(3 + i % 7, 12 - i % 5) for i in range(12)]
    llm.engine.observer = real = Plans()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in sizes]
    llm.generate([[i + 1] * n for i, (n, _) in enumerate(sizes)], params, use_tqdm=False)
    scheduler = Scheduler(BlockManager(12, 4), 5, 8)
    simulation = Simulation(scheduler, lambda step: 1.0, async_scheduling=ahead)
    simulation.observer = simulated = Plans()
    assert [*simulation.run([alone(0.0, *pair, i) for i, pair in enumerate(sizes)])][-1] == 12
    assert scheduler.preemptions == llm.stats()["preemptions"] > 0
    assert simulated.steps == real.steps


@pytest.mark.parametrize("num_blocks", [40, 100, 1000])
def test_hits_are_those_of_a_cache_of_blocks(num_blocks: int) -> None:
    """One request at a time, the least recently used block is evicted."""
    requests = make_chat(200)
    cached, hits = OrderedDict[int, None](), 0
    for request in requests:
        # Its first token is computed with the prompt, and the KV of its last one never.
        num_blocks_used = -(-(request.num_prompt + request.num_output - 1) // HASHED)
        full = request.hash_ids[: request.num_prompt // HASHED]
        matched: list[int] = []
        for i in full[: (request.num_prompt - 1) // HASHED]:
            if i not in cached:
                break
            matched.append(i)
        for i in matched:
            del cached[i]
        hits += len(matched)
        while len(cached) + num_blocks_used > num_blocks:
            cached.popitem(last=False)
        # Blocks that hold its output are cached too, and no prompt matches them.
        output = range(len(full), (request.num_prompt + request.num_output - 1) // HASHED)
        for i in [*(-request.hash_ids[-1] * 10 - n for n in reversed(output)), *reversed(full)]:
            cached[i] = None
    simulation = Simulation(
        Scheduler(BlockManager(num_blocks, HASHED), 4, 10**6), lambda step: 1.0, concurrency=1
    )
    assert [*simulation.run(requests)][-1] == len(requests)
    assert simulation.scheduler.cached_tokens == hits * HASHED > 0


def test_times_and_counts() -> None:
    """Two requests, whose steps take a second each."""
    requests = [alone(0.0, 4, 4, 0), alone(1.5, 6, 2, 1)]
    scheduler = Scheduler(BlockManager(20, 4), 4, 100)
    simulation = Simulation(scheduler, lambda step: 1.0, limits=(1.0, 1.0))
    assert [*simulation.run(requests)] == [0, 0, 0, 2]
    found = simulation.results()
    # The second arrives during the second step, and has its tokens after 1.5 and 2.5 seconds.
    assert list(simulation.first) == [1.0, 1.5]
    assert list(simulation.between) == [1.0] * 4
    assert found["seconds"] == found["steps"] == 4
    assert found["goodput"] == 1 / 4
    assert found["longest_stall_tokens"] == 7  # the prompt of the second, and its own token
    assert found["output_tokens_per_second"] == 6 / 4


def test_a_roofline() -> None:
    """Of a decode of one sequence: it reads the weights, and the KV of its context."""
    clock = Roofline("qwen3-0.6b", "h100")
    weights = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) + 151_936 * 1024
    assert clock.layers + clock.head == weights
    seconds: list[float] = []

    def record(step: InFlightStep) -> float:
        seconds.append(clock(step))
        return seconds[-1]

    [*_] = Simulation(Scheduler(BlockManager(100, 16), 4, 512), record).run([alone(0, 600, 2, 0)])
    kv = 2 * 28 * 8 * 128 * 2
    assert seconds[2] == pytest.approx((2 * weights + kv * 602) / 3.35e12)
    pairs = 512 * 513 // 2
    flops = 2 * clock.layers * 512 + 4 * 28 * 16 * 128 * pairs  # a chunk has no result
    assert seconds[0] == pytest.approx(flops / 989e12)


def test_a_table_is_interpolated() -> None:
    seconds: list[float] = []
    table = Table([(1, 1.0), (3, 2.0), (5, 6.0)], per_key=100.0)

    def record(step: InFlightStep) -> float:
        seconds.append(table(step))
        return 1.0

    requests = [alone(0.0, n, 2, i) for i, n in enumerate((2, 2))]
    [*_] = Simulation(Scheduler(BlockManager(100, 16), 4, 512), record).run(requests)
    assert seconds == [4.0 + 100 * 6, 1.5 + 100 * 6]  # 4 tokens, then 2


POLICY = """
def policy_key(seq, block_manager):
    return -seq.arrival

def choose_victim(block_manager):
    return next(reversed(block_manager.evictable))

def reserve(scheduler):
    return 0
"""


def run(capsys: Any, *arguments: str) -> dict[str, float]:
    options = ["--table", "table.json", "--set", "num_kv_cache_blocks=60", "--json"]
    assert command.main([*arguments, *options]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table = {"seconds": [(1, 0.01), (100, 0.02)], "per_key": 0}
    Path("table.json").write_text(json.dumps(table))
    Path("table.csv").write_text("{}")
    return tmp_path


def test_the_command(capsys: Any) -> None:
    Path("policy.py").write_text(POLICY)
    plain = run(capsys)
    assert plain["requests"] == 500
    assert run(capsys) == plain
    other = run(capsys, "--policy", "policy.py")
    assert other["hit_share"] < plain["hit_share"]
    host = run(capsys, "--set", "swap_space=100")
    assert host["hit_share"] > plain["hit_share"]
    command.main(["--make", "short", "--shape", "cpu-small", "--device", "l4"])
    assert "first token p99" in capsys.readouterr().out
    run(capsys, "--trace", "page.html", "--steps", "5", "9")
    assert "<html" in Path("page.html").read_text()


def test_ctrl_c_shows_what_there_is(capsys: Any, monkeypatch) -> None:
    step = Simulation.step

    def interrupted(self: Simulation) -> None:
        if self.steps == 200:
            raise KeyboardInterrupt
        step(self)

    options = ["--table", "table.json", "--set", "num_kv_cache_blocks=60", "--json"]
    monkeypatch.setattr(Simulation, "step", interrupted)
    assert command.main(options) == 130
    assert json.loads(capsys.readouterr().out)["steps"] == 200
    monkeypatch.setattr(command, "read_requests", Mock(side_effect=KeyboardInterrupt))
    assert command.main(options) == 130
    assert not capsys.readouterr().out


JSON_LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
FAULTS = {
    "a.jsonl:2: the time is -0.001; it must not": JSON_LINE + JSON_LINE.replace('": 0', '": -1'),
    "a.jsonl:2: it arrives before": JSON_LINE.replace('": 0', '": 9') + JSON_LINE,
    "a.jsonl:1: 2 hash_ids do not fit input_length=6000: .* must be 12": JSON_LINE.replace(
        "600", "6000"
    ),
    "a.jsonl:1: the output has 0 tokens": JSON_LINE.replace("5", "0"),
    "a.jsonl:1: 'hash_ids' is missing": JSON_LINE.replace("hash_ids", "hashes"),
    "a.jsonl: no requests": "\n",
    "a.csv:2: the input has 0 tokens": "arrival,prompt,output\n1.5,0,3\n",
    "a.jsonl:1: a line must be an object": "[1, 2]",
    "a.csv:1: a line needs arrival, prompt": "1.5,1\n",
    "a.csv:3: invalid literal": "arrival,prompt,output\n1.5,1,3\n2,x,3\n",
    "a.txt: a trace is a .jsonl file or a .csv": "",
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_of_a_file(message: str) -> None:
    path = Path(message.split(":")[0])
    path.write_text(FAULTS[message])
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_a_csv_file() -> None:
    """The form of Azure's traces. Its prompts share nothing."""
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10")
    Path("azure.csv").write_text("\n".join((*lines, "2023-11-16 18:17:04.4799600,600,20")))
    first, second = read_trace(Path("azure.csv"))
    assert (first.time, second.time) == (0.0, pytest.approx(0.5))
    assert (first.num_prompt, first.num_output) == (4808, 10)
    assert not {*first.token_ids()} & {*second.token_ids()}
    Path("azure.csv").write_text("0.0,12,3\n1.5,12,3\n")
    assert len(read_trace(Path("azure.csv"))) == 2


@pytest.mark.parametrize(
    ("message", "arguments", "policy"),
    [
        (
            "request 0 needs [45] blocks of 512 tokens, and the pool has 3",
            ["--set", "num_kv_cache_blocks=3"],
            "",
        ),
        ("give --set num_kv_cache_blocks=N", ["--table", "table.json"], ""),
        ("qwen3-14b does not fit into l4", ["--shape", "qwen3-14b", "--device", "l4"], ""),
        ("give one of them", ["trace.csv", "--make", "chat"], ""),
        ("table.csv is no table", ["--table", "table.csv"], ""),
        ("none of 47767 steps", ["--trace", "a.html", "--steps", "90000", "90010"], ""),
        ("no request can be admitted: blocks", [], "def reserve(scheduler): return 10**9"),
        ("--concurrency -1: give 0 or more", ["--concurrency", "-1"], ""),
        ("seed has no effect here", ["--set", "seed=1"], ""),
        ("defines none of policy_key, choose_victim, reserve", [], "x = 1"),
        ("policy_key raised ZeroDivision", [], "def policy_key(seq, blocks): return 1 / 0"),
        ("policy_key returned None, which is not a n", [], "def policy_key(seq, blocks): pass"),
        ("choose_victim returned 0, which is not ev", [], "def choose_victim(blocks): return 0"),
    ],
)
def test_faults_of_a_command(message: str, arguments: list[str], policy: str, capsys: Any) -> None:
    if policy:
        Path("policy.py").write_text(policy)
        arguments = ["--policy", "policy.py", "--set", "num_kv_cache_blocks=60"]
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert re.search(message, capsys.readouterr().err)
