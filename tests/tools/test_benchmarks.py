"""bench.py runs the requests that it names, computes right figures, and checks its baselines."""

import json
import random
import re
import sys
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from checkpoints import random_llm, weights_of

import bench
from nanovllm.loading.checkpoint import Checkpoint
from tools.benchmarks import baselines, roofline, throughput, turn, workloads
from tools.benchmarks.workloads import SHAPES, WORKLOADS, Workload, make_workload, read_chats


def test_nano_is_nano_vllms_benchmark():
    work = make_workload("nano", WORKLOADS["nano"], 151_936)
    # These expressions are those of nano-vllm's bench.py.
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    assert work.prompts == prompts
    assert work.outputs == [rng.randint(100, 1024) for _ in range(256)]
    assert sum(work.outputs) == 133_966
    assert (work.rounds, work.temperature) == ([list(range(256))], 0.6)


@pytest.mark.parametrize("name", [name for name, spec in WORKLOADS.items() if not spec.chats])
def test_requests_are_as_the_table_says(name):
    spec = WORKLOADS[name]
    work = make_workload(name, spec, 300)
    assert work == make_workload(name, spec, 300)
    assert len(work.prompts) == len(work.outputs) == spec.count * spec.turns
    assert [i for r in work.rounds for i in r] == list(range(len(work.prompts)))
    assert all(len(r) == (1 if spec.alone else spec.count) for r in work.rounds)
    assert all(spec.output[0] <= n <= spec.output[1] for n in work.outputs)
    for i, prompt in enumerate(work.prompts):
        known = work.prompts[0][: spec.prefix]
        if (before := i - spec.count) >= 0:
            known = work.prompts[before] + prompt[len(work.prompts[before]) : work.lengths[before]]
        times = 10 if spec.long_every and i % spec.long_every == 0 else 1
        assert prompt[: len(known)] == known
        assert spec.input[0] <= (len(prompt) - len(known)) / times <= spec.input[1]
    # The embedded model has 1,024 positions.
    assert max(work.lengths) <= (1024 if spec.model is None else SHAPES[spec.model][-1])


def test_real_chats(embedded):
    work = read_chats("chat-real", embedded.get_tokenizer())
    assert work.rounds == [list(range(16)), list(range(16, 32))]
    system = [ids[0] for ids in zip(*work.prompts, strict=False) if len({*ids}) == 1]
    assert len(system) > 20
    for first, second in zip(work.prompts[:16], work.prompts[16:], strict=True):
        assert second[: len(first)] == first
    assert min(work.outputs) > 1


def test_the_file_of_a_shape_holds_the_dummy_weights(tmp_path):
    directory = workloads.write_shape("cpu-small", tmp_path)
    plain = dict(attention_backend="sdpa")  # its weights are not packed
    llm = random_llm(directory, load_format="dummy", **plain)
    dummy = weights_of(llm)
    workloads.write_weights(directory, torch.float32)
    loaded = weights_of(random_llm(directory, **plain))
    assert all(torch.equal(dummy[name], loaded[name]) for name in dummy)


def test_roofline_by_hand(tmp_path):
    sizes = dict(vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2)
    config = Checkpoint(workloads.write_shape("cpu-small", tmp_path)).model_config
    config = replace(config, **sizes, num_kv_heads=1, head_dim=4)
    # In each layer: q 8x8, k and v 8x4 each, out 8x8, gate and up 8x16 each, down 16x8.
    layers, head = 3 * (64 + 32 + 32 + 64 + 3 * 128), 800
    # K and V, layers, heads, size, bytes; 2 FLOPs each for q k and p v, layers, heads, size.
    kv_token, look = 2 * 3 * 1 * 4 * 2, 4 * 3 * 2 * 4
    work = Workload("w", [[1, 2, 3], [1, 9]], [3, 1], [[0, 1]])
    cost = roofline.costs(work, config, itemsize=2, max_num_seqs=8)
    assert cost["weight_bytes"] == 2 * (layers + head)
    # The prompts share the 1. Positions 1, 2, 3 attend to as many tokens, and the 9 to two.
    assert cost["prefill_flops"] == 2 * layers * 4 + 2 * head * 2 + look * (1 + 2 + 3 + 2)
    assert (cost["prefill_tokens"], cost["prefill_bytes"]) == (
        4,
        2 * (layers + head) + 4 * kv_token,
    )
    # The first request decodes twice, over 4 and 5 tokens; prefill yields the second one's token.
    assert (cost["decode_steps"], cost["kv_bytes"]) == (2, (4 + 5) * kv_token)
    assert cost["decode_bytes"] == 2 * cost["weight_bytes"] + cost["kv_bytes"]
    assert cost["decode_flops"] == 2 * (layers + head) * 2 + look * (4 + 5)
    bounds = roofline.bounds(cost, {"bandwidth": 1e3, "flops": 1e12})
    assert bounds["decode"] == (cost["decode_bytes"] / 1e3, "memory-bound")
    for name, size in {"int8": 1, "int4": 0.5625, "awq": 2}.items():  # awq is decoded
        cost = roofline.costs(work, config, 2, 8, quantization=name)
        weights = round(layers * size + head * (2 if size == 2 else 1))
        assert (cost["weight_bytes"], cost["decode_weight_bytes"]) == (weights, 2 * weights)
        assert cost["kv_bytes"] == (4 + 5) * kv_token
    # Two requests that decode together read the prefix that they share once.
    for second, tokens in (([4, 5, 6], 8), ([1, 2, 6], 6)):
        work = Workload("w", [[1, 2, 3], second], [2, 2], [[0, 1]])
        assert roofline.costs(work, config, 2, 8)["kv_bytes"] == tokens * kv_token


def test_roofline_of_experts(tmp_path):
    """A step reads the experts that its rows are expected to use; a token computes with its own."""
    config = Checkpoint(workloads.write_shape("cpu-moe", tmp_path)).model_config
    expert, layers, head = 3 * 1024 * 384, 8, 1024 * 151_936
    dense = layers * 3 * 1024 * 2048
    work = Workload("w", [[1], [2], [3]], [3, 2, 2], [[0, 1, 2]])
    cost = roofline.costs(work, config, itemsize=2, max_num_seqs=8)
    assert cost["weight_bytes"] == 2 * (head + dense + layers * 64 * expert)
    # Three rows decode in the first step, and one in the second. Two of them do not choose one of
    # the 64 experts with the probability (56 / 64) ** 2.
    assert roofline.decode_rows(work, 8) == {3: 1, 1: 1}
    hits = 64 * (1 - 0.875**3), 8
    weights = 2 * (head + dense) + layers * expert * sum(hits)
    assert cost["decode_weight_bytes"] == pytest.approx(2 * weights, rel=1e-6)
    assert roofline.expected_hits(work, config.experts, 8) == pytest.approx(sum(hits) / 2)
    attended = 4 * layers * 16 * 128 * (2 + 3 + 2 + 2)
    used = head + dense + layers * 8 * expert
    assert cost["decode_flops"] == 2 * used * 4 + attended


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_the_sizes_of_their_names(shape, tmp_path):
    config = Checkpoint(workloads.write_shape(shape, tmp_path)).model_config
    size = roofline.costs(Workload("w", [[1]], [2], [[0]]), config, 1, 1)["weight_bytes"]
    # An input embedding of its own is no cost, because a token reads one row of it.
    size += (not config.tie_word_embeddings) * config.vocab_size * config.hidden_size
    # The numbers of the model cards, in billions.
    billions = {
        "0.6b": 0.596,
        "1.7b": 1.72,
        "4b": 4.02,
        "8b": 8.19,
        "14b": 14.77,
        "7b": 7.62,
        "0.8b": 0.752,
        "30b": 30.53,
        "35b": 34.66,
        "moe": 0.811,
    }
    assert size / 1e9 == pytest.approx(billions.get(shape.split("-")[1], 0.004197), rel=0.01)


def test_run_and_profile(path):
    llm = random_llm(path)
    work = Workload("w", [[1, 2, 3], [4, 5]], [4, 6], [[0], [1]])
    run = turn.run_engine(llm, work)
    assert [s["sequences"] for s in run["steps"]] == [1] * 10
    assert sum(s["tokens"] for s in run["steps"]) == 3 + 3 + 2 + 5
    rows = turn.profile_run(llm, work)
    assert any("attend" in name for name in rows)
    assert not any(name.startswith(("functional.", "_ops.")) for name in rows), "torch's functions"
    assert not any(name.endswith(("reset_prefix_cache", "_free_all")) for name in rows)
    assert "schedule" not in vars(llm.engine.scheduler), "the methods are restored"


@pytest.mark.slow
def test_hf_baselines_generate_what_they_claim(path, monkeypatch):
    """Token 0 is the end token of the checkpoint, and no baseline may stop there."""
    model = baselines.load_hf_model(path, torch.float32, torch.device("cpu"))
    # All tokens become equally likely.
    model.lm_head.weight.data.zero_()
    long = Workload("w", [[5, 6, 7], [8, 9]], [200, 150], [[0, 1]])
    for name in ("hf", "hf-batch"):
        part, _ = baselines.hf_part(name, long, None, 64)
        assert sum(part.outputs) == 350
        assert baselines.run_hf(name, model, part, 64)["seconds"] > 0
    # Each request of continuous batching has its own number, with one row or with all.
    calls = Mock(side_effect=model.forward)
    monkeypatch.setattr(model, "forward", calls)
    for size, steps in ((1, 350), (64, 200)):
        calls.reset_mock()
        assert baselines.run_hf_paged(model, long, size)["seconds"] > 0
        assert calls.call_count == 1 + steps  # one request makes the cache
    # A static cache, which is compiled on a GPU only, begins with its largest size.
    part, _ = baselines.hf_part("hf-compiled", replace(long, outputs=[150, 200]), None, 64)
    assert part.rounds == [[1], [0]]


FAKE = """
from types import SimpleNamespace as SamplingParams
__version__ = "0.0-fake"
class LLM:
    def __init__(self, **options):
        assert options["skip_tokenizer_init"] and options["max_model_len"] >= 9
    def reset_prefix_cache(self):
        pass
    def generate(self, prompts, params, use_tqdm):
        print("what an engine prints is no answer")
        outs = [SamplingParams(token_ids=[0] * LENGTH) for p in params if p.ignore_eos]
        return [SamplingParams(outputs=[out]) for out in outs]
"""


def fake_vllm(tmp_path, length):
    """Return a Python that imports a fake vLLM whose outputs have `length` tokens."""
    (tmp_path / "vllm.py").write_text(FAKE.replace("LENGTH", length))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.skipif(sys.platform == "win32", reason="its Python is a shell script")
def test_vllm_in_its_own_process(tmp_path):
    """vLLM is a fake here; the script, its input and output, and the check are real."""
    work = Workload("w", [[5, 6, 7], [8, 9], [11, 12, 13, 14]], [3, 7, 5], [[0, 1], [2]])

    def start(length):
        command = [fake_vllm(tmp_path, length), str(throughput.vllm_peer.__file__)]
        return turn.Process(command, baselines.vllm_job({"model": "m"}, work))

    process = start("p.max_tokens")
    assert set(process.loaded) == {"load_seconds", "first_seconds"}
    assert all(process.turn()["seconds"] >= 0 for _ in range(2))
    process.end()
    assert baselines.vllm_version(str(tmp_path / "python")) == "0.0-fake"
    with pytest.raises(RuntimeError, match=r"\[2, 2, 2\] tokens instead of \[3, 7, 5\]"):
        start("2")


RANGE, MODE = "give a whole number from 1 to 100000", "goes with the throughput only; leave out"
BAD_INPUT = {
    "--baseline tgi": "hf-compiled",
    "--workload huge": "known: short, nano, cpu-mixed",
    "--workload shrot": "--workload: unknown workload 'shrot'; did you mean 'short'?",
    "--input 9 3": "--input 9 3: give MIN <= MAX",
    "--num-seqs 99999999": f"--num-seqs: 99999999: {RANGE}",
    "--host-only --baseline hf": f"--baseline {MODE} --host-only",
    "--baseline vllm": "give the Python of a venv where vllm",
    "--baseline vllm --peer-python /no/python": "--peer-python /no/python fails: [Errno 2]",
    "--json /no/where.json": "cannot write /no/where.json; name a file in a directory that exists",
    "--set max_num_seqs": "max_num_seqs: give OPTION=VALUE",
    "--set max_num_seq=3": "did you mean 'max_num_seqs'?",
    "--set max_num_seqs=0": "max_num_seqs must be between 1",
    "--model /no/model": "there is no directory '/no/model'",
    "--workload nano --model qwen3-nano": "qwen3-nano ends at 1,024",
    "--shape qwen3-14b": "use a smaller --shape (qwen3-0.6b)",
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.items())
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(throughput, "available_host_memory", lambda: 16 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments.split())
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_messages_without_a_run(capsys, monkeypatch):
    monkeypatch.setattr(throughput, "throughput", Mock(side_effect=KeyboardInterrupt))
    assert bench.main([]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    printed = capsys.readouterr()
    assert all(name in printed.out for name in (*WORKLOADS, *baselines.BASELINES, *SHAPES))


@pytest.mark.skipif(sys.platform == "win32", reason="its Python is a shell script")
@pytest.mark.slow
def test_end_to_end(path, tmp_path, capsys, monkeypatch):
    peak = {"bandwidth": 1e10, "buffer_bytes": 1, "flops": 1e11}
    monkeypatch.setattr(roofline, "measure_peak", lambda *_: peak)

    # The other engines than vLLM run in this process, which has the imports.
    class Process(turn.Process):
        def __new__(cls, command, job, variables):
            if command != turn.COMMAND:
                return turn.Process(command, job, variables)
            loaded, measured = turn.load(job)
            return SimpleNamespace(loaded=loaded, turn=measured, end=lambda: None)

    python = fake_vllm(tmp_path, "no_such_name")
    kept = tmp_path / "run.json"
    numbers = "--num-seqs 5 --input 3 9 --output 2 6 --repeats 2 --batch-size 2 --sample 3"
    rest = f"--set device=cpu --json {kept} --baseline hf-batch vllm"
    rest += f" --peer-python {python}"
    with monkeypatch.context() as patch:
        patch.setattr(throughput, "Process", Process)
        assert bench.main(f"--model {path} {numbers} {rest}".split()) == 1
    printed = capsys.readouterr().out
    assert "vllm                   failed: it ended with status 1" in printed
    assert "no_such_name" in printed
    assert "times as fast in the pairs of turns; median" in printed
    assert max(map(len, printed.split("\n"))) <= 100
    result = json.loads(kept.read_text())
    spec = replace(WORKLOADS["short"], count=5, input=(3, 9), output=(2, 6))
    work, engines, run = make_workload("short", spec, 199), result["engines"], result["run"]
    # A sample says so, and keeps whole batches.
    notes = {"nanovllm": "", "hf-batch": "4 of 5 requests in batches of 2"}
    assert {e["name"]: e["note"] for e in engines} == notes
    assert engines[0]["output_tokens"] == sum(work.outputs)
    assert run["seconds"] == max(r["seconds"] for r in engines[0]["runs"])
    assert len(run["steps"]) == max(work.outputs)
    assert sum(s["tokens"] for s in run["steps"]) == sum(work.lengths) - 5
    least = sum(seconds for seconds, _ in result["roofline"].values())
    assert result["roofline_share"] == pytest.approx(least / run["seconds"])
    assert result["machine"]["torch"] == torch.__version__
    # In a process of its own. The rate of a prompt does not count the token after it.
    arguments = f"--model {path} --workload pp512 --input 9 9 --json {kept} --set device=cpu"
    assert bench.main(arguments.split()) == 0
    result = json.loads(kept.read_text())
    rate = median(9 / run["seconds"] for run in result["engines"][0]["runs"])
    printed = capsys.readouterr().out.partition("prompt tokens/s")[2]
    assert re.search(rf"^nanovllm +{rate:,.1f} .* {rate * 10 / 9:,.0f} ", printed, re.MULTILINE)
