"""bench.py: its requests are the ones it names, its sums are right, and its baselines are real."""

import importlib.util
import json
import os
import random
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import make_checkpoint, random_llm

from nanovllm.benchmarks import baselines, noise, process, roofline, shapes, step, throughput
from nanovllm.benchmarks.measure import run_ours, where
from nanovllm.benchmarks.workloads import WORKLOADS, Workload, make_workload
from nanovllm.config import ModelConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", ROOT / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return path


# ---- workloads ----


def test_nano_is_nano_vllms_benchmark() -> None:
    work = make_workload("nano", WORKLOADS["nano"], 151_936)
    assert work.num_output == 133_966
    rng = random.Random(0)  # nano-vllm's bench.py, line for line
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    assert work.prompts == prompts
    assert work.outputs == [rng.randint(100, 1024) for _ in range(256)]
    assert work.rounds == [list(range(256))]
    assert work.temperature == 0.6


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_as_the_table_says(name: str) -> None:
    spec = WORKLOADS[name]
    work = make_workload(name, spec, 300)
    assert work == make_workload(name, spec, 300)
    assert len(work.prompts) == len(work.outputs) == spec.count * spec.turns
    assert sorted(i for r in work.rounds for i in r) == list(range(len(work.prompts)))
    assert all(spec.output[0] <= n <= spec.output[1] for n in work.outputs)
    assert all(0 <= token < 300 for p in work.prompts for token in p)
    assert all(len(r) == (1 if spec.alone else spec.count) for r in work.rounds)
    for i, prompt in enumerate(work.prompts[: spec.count]):
        times = 10 if spec.long_every and i % spec.long_every == 0 else 1
        assert spec.input[0] <= (len(prompt) - spec.prefix) / times <= spec.input[1]
        assert prompt[: spec.prefix] == work.prompts[0][: spec.prefix]
    for i in range(spec.count, len(work.prompts)):  # a later turn holds the ones before it
        before = work.prompts[i - spec.count]
        assert work.prompts[i][: len(before)] == before
        own = len(work.prompts[i]) - len(before) - work.outputs[i - spec.count]
        assert spec.input[0] <= own <= spec.input[1]
    if spec.model is None:
        assert work.longest <= 1024, "the embedded model ends there"
    else:
        assert work.longest <= shapes.SHAPES[spec.model][-1]


def test_distinct_tokens_by_hand() -> None:
    work = Workload("w", [[1, 2, 3], [1, 2, 4, 5], [1, 2], [7]], [1] * 4, [[0, 1, 2], [3]])
    assert sum(end - start for start, end in work.distinct()) == 3 + 2 + 0 + 1
    assert work.common_prefix([0, 1, 2]) == 2
    assert work.common_prefix([3]) == 0
    part = work.subset([1, 3])
    assert (part.prompts, part.rounds) == ([[1, 2, 4, 5], [7]], [[0], [1]])


# ---- the roofline ----

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=100, hidden_size=8, intermediate_size=16,
    num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4,
    rope_factor=1.0, max_position_embeddings=64, tie_word_embeddings=True, attention_bias=False,
    output_bias=False, qk_norm=True, sliding_window=None, dtype=None,
)  # fmt: skip


def test_roofline_by_hand() -> None:
    # Of a layer: q 8x8, k and v 8x4 each, out 8x8, gate and up 8x16 each, down 16x8.
    layers, head = 3 * (64 + 32 + 32 + 64 + 3 * 128), 800
    kv_token = 2 * 3 * 1 * 4 * 2  # K and V, layers, heads, size, bytes
    look = 4 * 3 * 2 * 4  # q k and p v, 2 FLOPs each; layers, heads, size
    work = Workload("w", [[1, 2, 3], [1, 9]], [3, 1], [[0, 1]])
    need = roofline.need(work, TINY, itemsize=2, max_num_seqs=8)
    assert need.weight_bytes == 2 * (layers + head)
    assert need.prefill_tokens == 4  # the 1 is shared
    # Positions 1, 2, 3 look at as many tokens, and the 9 at two.
    assert need.prefill_flops == 2 * layers * 4 + 2 * head * 2 + look * (1 + 2 + 3 + 2)
    assert need.prefill_bytes == 2 * (layers + head) + 4 * kv_token
    # The first request decodes twice, over 4 and 5 tokens, of which the 1 is the round's prefix;
    # the second has its only token from prefill.
    assert need.steps == 2
    assert need.kv_bytes == (4 + 5) * kv_token
    assert need.decode_flops == 2 * (layers + head) * 2 + look * (4 + 5)
    floor = roofline.floor(need, roofline.Rates(bandwidth=1e3, read_bytes=1, matmul=1e12))
    assert floor.decode == pytest.approx((2 * need.weight_bytes + need.kv_bytes) / 1e3)
    assert floor.total == floor.prefill + floor.decode


def test_a_shared_prefix_is_read_once_a_step() -> None:
    kv_token = 2 * 3 * 1 * 4 * 2
    alone = Workload("w", [[1, 2, 3], [4, 5, 6]], [2, 2], [[0, 1]])
    shared = Workload("w", [[1, 2, 3], [1, 2, 6]], [2, 2], [[0, 1]])
    found = [roofline.need(w, TINY, 2, 8).kv_bytes for w in (alone, shared)]
    assert found == [8 * kv_token, 6 * kv_token]


def test_roofline_of_nano_is_issue_5s(tmp_path: Path) -> None:
    config = ModelConfig.from_file(shapes.write_shape("qwen3-0.6b", tmp_path) / "config.json")
    work = make_workload("nano", WORKLOADS["nano"], config.vocab_size)
    need = roofline.need(work, config, 2, 256)
    assert need.kv_bytes == pytest.approx(13.85e12, rel=0.01)
    assert need.steps * need.weight_bytes == pytest.approx(1.2e12, rel=0.02)


def test_rates_are_measured() -> None:
    rates = roofline.measure_rates(torch.device("cpu"), torch.float32, 1 << 20, seconds=0.01)
    assert 1e8 < rates.bandwidth < 1e13
    assert 1e8 < rates.matmul < 1e15


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_shapes_have_the_sizes_they_are_named_for(shape: str, tmp_path: Path) -> None:
    config = ModelConfig.from_file(shapes.write_shape(shape, tmp_path) / "config.json")
    billions = {"0.6b": 0.596, "1.7b": 1.72, "4b": 4.02, "8b": 8.19, "14b": 14.77, "7b": 7.62}
    size = billions.get(shape.split("-")[1], 0.004197)  # the model cards' numbers
    assert shapes.num_parameters(config) / 1e9 == pytest.approx(size, rel=0.01)


def test_a_shapes_file_holds_the_dummy_weights(tmp_path: Path) -> None:
    directory = shapes.write_shape("cpu-small", tmp_path)
    dummy = random_llm(directory, load_format="dummy").engine.runner.model.checkpoint_tensors()
    shapes.write_weights(directory, torch.float32)
    loaded = random_llm(directory).engine.runner.model.checkpoint_tensors()
    assert all(torch.equal(dummy[name], loaded[name]) for name in dummy)


# ---- measuring the engine ----


def test_where_accounts_for_all_of_the_time(tiny: Path) -> None:
    llm = random_llm(tiny)
    work = Workload("w", [[1, 2, 3], [4, 5]], [4, 6], [[0], [1]])
    run = run_ours(llm, work)
    assert len(run.first_token) == len(run.per_token) == 2
    assert [s.sequences for s in run.steps] == [1] * 10
    assert sum(s.tokens for s in run.steps) == 3 + 3 + 2 + 5
    whole = where(llm, work, 0, len(run.steps))
    assert whole.steps == (0, 10)
    assert sum(whole.parts.values()) == pytest.approx(whole.seconds)
    assert min(whole.parts.values()) > 0
    assert {"attention", "linear layers", "sampling"} < set(whole.parts)
    assert where(llm, work, 2, 5).steps == (2, 5)
    assert not llm.engine.has_unfinished_requests()
    assert run_ours(llm, work).steps, "the engine is as it was"


def test_noise_of_ourselves_is_none() -> None:
    assert noise.cpu_seconds(os.getpid()) == pytest.approx(sum(os.times()[:4]), abs=0.1)
    share = noise.Neighbours().share()
    assert share is None or 0 <= share <= 1
    assert noise.verdict(0.031).endswith("noisy")
    assert noise.verdict(0.029) == "2.9% of the machine"


def test_memory_is_read_in_bytes() -> None:
    process.reset_peak(torch.device("cpu"))
    block = torch.ones(32 << 20, dtype=torch.uint8)
    assert process.peak(torch.device("cpu")) >= process.rss() - (8 << 20) > len(block)


# ---- baselines ----

WORK = Workload("w", [[5, 6, 7], [8, 9], [11, 12, 13, 14]], [3, 7, 5], [[0, 1], [2]])


def test_hf_baselines_generate_what_they_claim(tiny: Path) -> None:
    """Token 0 ends a sequence by the checkpoint; no baseline may stop there. Each checks itself."""
    model = baselines.load_hf_model(tiny, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token as likely as any other, the end among them
    long = Workload("w", [[5, 6, 7], [8, 9]], [200, 150], [[0, 1]])
    for name in ("hf", "hf-batch", "hf-continuous"):
        made = baselines.make_hf(name, model, long, None, 64)
        assert made.workload.num_output == 350
        assert made.run(made.workload) > 0


def test_a_sample_says_so_and_keeps_whole_batches() -> None:
    work = Workload("w", [[1]] * 10, [1] * 10, [list(range(10))])
    one = baselines.make_hf("hf", None, work, None, 64)
    assert (len(one.workload.prompts), one.note) == (4, "4 of 10 requests")
    some = baselines.make_hf("hf-batch", None, work, 5, 4)
    assert (len(some.workload.prompts), some.note) == (8, "batches of 4, 8 of 10 requests")
    assert baselines.make_hf("hf-batch", None, work, None, 64).note == "batches of 10"


def test_too_few_tokens_are_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"x generated \(3, 4\)"):
        baselines.check([2, 3], [2, 4], "x")


FAKE = """
import types
__version__ = "0.0-fake"
SamplingParams = lambda **o: types.SimpleNamespace(**o)
class LLM:
    def __init__(self, **options):
        print("noise on stdout")
        assert options["skip_tokenizer_init"] and options["max_model_len"] == 9
    def reset_prefix_cache(self): pass
    def generate(self, prompts, params, use_tqdm):
        assert all(p["prompt_token_ids"] for p in prompts)
        if not isinstance(params, list): return []
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0] * LENGTH)])
                for p in params]
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter in which `import vllm` finds the fake above."""

    def make(length: str) -> str:
        (tmp_path / "vllm.py").write_text(FAKE.replace("LENGTH", length))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return str(python)

    return make


def start_fake(python: str) -> baselines.Baseline:
    cpu = torch.device("cpu")
    return baselines.start_vllm("vllm", python, ROOT, torch.float32, cpu, WORK, 8)


def test_vllms_pipe(fake_vllm: Callable[[str], str]) -> None:
    """A fake of vLLM: the script, the pipe and the check are real."""
    python = fake_vllm("p.max_tokens")
    assert baselines.peer_version(python) == "0.0-fake"
    peer = start_fake(python)
    assert peer.note.startswith("0.0-fake, ")
    assert peer.run(WORK) >= 0
    assert peer.run(WORK) >= 0, "as often as it is asked"
    peer.close()
    assert noise.cpu_seconds(peer.pids[0]) == 0, "it is gone"
    lazy = start_fake(fake_vllm("2"))
    with pytest.raises(RuntimeError, match="vllm generated"):
        lazy.run(WORK)
    lazy.close()
    dying = start_fake(fake_vllm("(1 // 0)"))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        dying.run(WORK)
    dying.close()


# ---- bench.py itself ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--baseline tgi", "choose from 'hf', 'hf-batch'"),
        ("--workload huge", "choose from 'short', 'nano'"),
        ("--shape qwen3-400b", "choose from 'qwen3-0.6b'"),
        ("--input 9 3", "--input 9 3: give 1 <= MIN <= MAX"),
        ("--output 0 3", "--output 0 3: give 1 <= MIN <= MAX"),
        ("--repeats 0", "--repeats 0: give 1 or more"),
        ("--num-seqs 99999999", "--num-seqs 99999999: give 100000 at most"),
        ("--plot x.foo", "--plot x.foo: name a .png, .pdf or .svg file"),
        ("--startup --json x.json", "--json goes with the throughput only"),
        ("--host-only --baseline hf", "--baseline goes with the throughput only"),
        ("--prefix -1", "--prefix -1: give 0 or more"),
        ("--baseline vllm", "needs --peer-python"),
        ("--baseline vllm --peer-python /no/python", "cannot be run (No such file or directory)"),
        ("--baseline vllm --peer-python /bin/false", "cannot import vllm"),
        ("--json /no/where.json", "name a file in a directory that exists"),
        ("--set max_num_seqs", "give OPTION=VALUE"),
        ("--set max_num_seq=3", "did you mean 'max_num_seqs'?"),
        ("--set max_num_seqs=0", "must be at least 1"),
        ("--model /no/model", "there is no directory '/no/model'"),
        ("--model x --shape cpu-small", "not allowed with"),
        ("--workload nano --model qwen3-nano", "qwen3-nano ends at 1,024"),
        ("--shape qwen3-14b", "use a smaller one (--shape qwen3-0.6b"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    bench: ModuleType,
    argv: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shapes, "available_host_memory", lambda: 16 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(throughput, "LLM", None)  # nothing is loaded
    with pytest.raises(SystemExit) as exit_:
        bench.main(argv.split())
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_ctrl_c_is_one_line(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "throughput", interrupted)
    assert bench.main([]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_plot_needs_matplotlib(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--plot", "x.png"])
    assert exit_.value.code == 2
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


def test_help_names_every_workload_and_baseline(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    printed = capsys.readouterr().out
    for name in (*WORKLOADS, *baselines.BASELINES, *shapes.SHAPES):
        assert name in printed


def test_end_to_end(
    bench: ModuleType,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = roofline.Rates(1e10, 1, 1e11)
    monkeypatch.setattr(throughput, "measure_rates", lambda *_: rates)
    kept = tmp_path / "run.json"
    numbers = "--num-seqs 5 --input 3 9 --output 2 6 --repeats 2 --batch-size 2 --sample 3"
    options = (
        "--dtype float32 --set device=cpu --set num_kvcache_blocks=64 --set async_scheduling=False"
    )
    argv = f"--model {tiny} {numbers} {options} --baseline hf hf-batch --json {kept}".split()
    assert bench.main(argv) == 0
    printed = capsys.readouterr().out
    found = json.loads(kept.read_text())
    spec = replace(WORKLOADS["short"], count=5, input=(3, 9), output=(2, 6))
    work = make_workload("short", spec, 199)
    ours, hf, batch = found["rows"]
    assert [r["name"] for r in found["rows"]] == ["nanovllm", "hf", "hf-batch"]
    assert ours["output_tokens"] == work.num_output
    assert hf["note"] == "3 of 5 requests"
    assert batch["note"] == "batches of 2, 4 of 5 requests"
    assert all(len(r["repeats"]) == 2 for r in found["rows"])
    seconds = [t["seconds"] for t in ours["repeats"]]
    assert found["run"]["seconds"] == max(seconds), "of two the slower counts"
    speeds = [work.num_output / s for s in seconds]
    summary = found["summary"]
    assert summary["output_tokens_per_second"] == pytest.approx(sum(speeds) / 2)
    pairs = zip(ours["repeats"], hf["repeats"], strict=True)
    times = [
        (work.num_output / a["seconds"]) / (hf["output_tokens"] / b["seconds"]) for a, b in pairs
    ]
    assert summary["ratios"]["hf"] == pytest.approx(sum(times) / 2)
    assert summary["steps"] == max(work.outputs)
    assert sum(s["tokens"] for s in found["run"]["steps"]) == work.num_input + work.num_output - 5
    reached = (found["floor"]["prefill"] + found["floor"]["decode"]) / found["run"]["seconds"]
    assert summary["fraction_of_floor_reached"] == pytest.approx(reached)
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["command"].startswith("bench.py --model")
    assert f"{work.num_output:,} out" in printed
    assert "of the floor's speed" in printed


def test_a_baseline_that_fails_is_left_out(
    bench: ModuleType,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(throughput, "measure_rates", lambda *_: roofline.Rates(1e10, 1, 1e11))

    def fail(*_: object) -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(baselines, "run_continuous", fail)
    argv = f"--model {tiny} --num-seqs 2 --output 2 3 --repeats 1 --baseline hf-continuous"
    assert bench.main([*argv.split(), "--set", "device=cpu"]) == 1
    printed = capsys.readouterr()
    assert "hf-continuous is left out, for it failed: no such kernel" in printed.err
    assert "hf-continuous" not in printed.out


def test_plot_is_drawn(
    bench: ModuleType, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(throughput, "measure_rates", lambda *_: roofline.Rates(1e10, 1, 1e11))
    kept = tmp_path / "run.png"
    argv = f"--model {tiny} --num-seqs 2 --output 2 3 --repeats 1 --set device=cpu --plot {kept}"
    assert bench.main(argv.split()) == 0
    assert kept.read_bytes().startswith(b"\x89PNG")


def test_step(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "SHAPE", "cpu-small")
    assert bench.main(["--step"]) == 0
    out = capsys.readouterr().out
    found = {line[:26].strip(): float(line[26:].split()[0]) for line in out.split("\n")[2:5]}
    assert list(found) == [
        "the engine's step",
        "its linear layers alone",
        "KV gathered, two products",
    ]
    assert 0 < found["its linear layers alone"] < found["the engine's step"]
