"""Lessons 2 and 11c and electives: what they print is what they are meant to show."""

import pytest
import torch
from lesson_runs import run_lesson

from lessons import elective_fp8_cache as fp8_cache
from lessons import elective_structured_outputs as structured
from lessons import lesson02_model as page
from lessons import lesson11c_latency as latency
from lessons.lesson import make_llm
from nanovllm import LLM

OTHER = "another answer, greedy"


def row(printed: str, name: str) -> list[str]:
    [line] = [line for line in printed.splitlines() if line.startswith(name + "  ")]
    return line.removeprefix(name).split()


def test_structured_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    structured.run()
    printed = capsys.readouterr().out
    *_, allowed, _, drawn, rank = next(
        line.rsplit(None, 4) for line in printed.splitlines() if line.startswith("0  ")
    )
    assert drawn == "'{'"
    assert int(allowed) < 10 < int(rank)  # the model would have written something else
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_fp8_cache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_cache, "SAMPLES", fp8_cache.SAMPLES[:4])
    fp8_cache.run()
    printed = capsys.readouterr().out
    assert row(printed, "1000") == ["448", "1024", "55.2%", "55.2%"]
    assert row(printed, "1.07") == ["1.125", "1.125", "5.1%", "100.0%"]
    scores = [float(row(printed, name)[-1]) for name in ("auto", "fp8")]
    assert scores[0] != scores[1]  # the cache is rounded
    assert scores[0] == pytest.approx(scores[1], abs=0.1)
    assert fp8_cache.show_rounding() <= 1 / 16
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_latency(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(REQUESTS=6, TOKENS=4, LOADS=(2.0,)).items():
        monkeypatch.setattr(latency, name, value)
    serve, calls = latency.serve, []

    def recorded(llm: LLM, arrivals: list[float]) -> tuple[list[tuple[float, float]], float]:
        calls.append((arrivals, *serve(llm, arrivals)))
        return calls[-1][1:]

    monkeypatch.setattr(latency, "serve", recorded)
    latency.run()
    (_, _, at_once), (arrivals, waits, seconds) = calls[-2:]
    assert arrivals[-1] == pytest.approx(at_once / 2.0)  # 6 requests at twice the capacity
    assert all(0 < first + 3 * between < seconds for first, between in waits)
    printed = capsys.readouterr().out
    first, between, served, good = map(float, row(printed, "2.0"))
    assert first > 0
    assert between > 0
    assert 0 <= good <= served
    assert max(map(len, printed.splitlines())) <= 100


def test_the_page_is_the_model() -> None:
    """`run` compares its logits with the engine's. A part that is left out would show."""
    printed = run_lesson("2")
    assert "is '1'." in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_drafts() -> None:
    printed = run_lesson("drafts")
    copies = [row(printed, name) for name in ("a copy, greedy", "a copy, temperature 0.8")]
    for _, without, steps, drafted, accepted, equal in [*copies, row(printed, OTHER)]:
        assert int(without) - int(steps) == int(accepted)
        assert int(accepted) <= int(drafted)
        assert equal == "yes"
    assert int(copies[0][2]) < int(copies[0][1]) / 2
    assert max(map(len, printed.splitlines())) <= 100


@torch.inference_mode()
def test_the_page_continues_from_a_prefix() -> None:
    """`attend` may give keys of earlier tokens, which are rotated by their own positions."""
    model, tokenizer = page.Model(), make_llm(num_kv_cache_blocks=8).get_tokenizer()
    ids, kv = tokenizer.encode(page.PROMPT), dict[int, tuple[torch.Tensor, ...]]()

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        q, *new = qkv
        old = kv.get(layer, (new[0][:0], new[1][:0]))
        kv[layer] = k, v = tuple(map(torch.cat, zip(old, new, strict=True)))
        padded = torch.cat((q.new_zeros(len(k) - len(q), *q.shape[1:]), q))
        return page.attention(layer, padded, k, v)[-len(q) :]

    whole = model.logits(ids, range(len(ids)), page.attention)
    parts = [model.logits(ids[a:b], range(a, b), attend) for a, b in ((0, 6), (6, len(ids)))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-3, rtol=1e-3)
