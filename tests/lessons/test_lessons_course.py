"""Lessons 2 and 11c and electives: what they print is what they are meant to show."""

import json
import re

import pytest
import torch
from lesson_runs import row, run_lesson

from lessons import elective_fp8_cache as fp8_cache
from lessons import elective_order as order
from lessons import elective_structured_outputs as structured
from lessons import lesson02_model as page
from lessons import lesson11c_latency as latency
from lessons.lesson import make_llm
from nanovllm import LLM


def test_structured_outputs() -> None:
    pytest.importorskip("llguidance")
    printed = run_lesson("structured_outputs")
    allowed, likely, drawn = row(printed, "0")
    assert (int(allowed), drawn) == (1, "'{'")
    assert likely != drawn  # the model would have written something else
    text = printed.partition("The output is '")[2].partition("': valid")[0]
    assert [*json.loads(text)] == structured.SCHEMA["required"]


@pytest.mark.slow
def test_fp8_cache(capsys, monkeypatch) -> None:
    monkeypatch.setattr(fp8_cache, "SAMPLES", fp8_cache.SAMPLES[:4])
    fp8_cache.run()
    printed = capsys.readouterr().out
    assert row(printed, "1000") == ["448", "448", "55.2%", "55.2%"]
    assert row(printed, "1.07") == ["1.125", "0", "5.1%", "100.0%"]
    assert row(printed, "auto") == ["4", "of", "4"]
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_latency(capsys, monkeypatch) -> None:
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
    assert "comes from rounding" in " ".join(printed.split())


def test_drafts() -> None:
    printed = run_lesson("drafts")
    runs = [row(printed, name) for name in ("a copy", "another answer")]
    for _, without, steps, drafted, accepted, equal in runs:
        assert int(without) - int(steps) == int(accepted)
        assert int(accepted) <= int(drafted)
        assert equal == "yes"
    assert int(runs[0][2]) < int(runs[0][1]) / 2


def test_order() -> None:
    printed = run_lesson("order")
    sums = {row(printed, name)[0] for name in ("1 chain", "2 splits", "8 splits")}
    assert len(sums) == 3
    assert [row(printed, batch)[1:] for batch in "148"] == [["yes"] * 2, *[["no", "yes"]] * 2]
    assert row(printed, "in a batch of 21") == ["0", "yes"]
    assert int(row(printed, "behind a prefix")[0]) > order.SEGMENT
    queries, keys = torch.randn(2, 8), torch.randn(2, 100, 8)
    for size in (100, 7):
        out = order.attend(queries.numpy(), *keys.numpy(), size)
        expected = (queries @ keys[0].T).softmax(-1) @ keys[1]
        torch.testing.assert_close(torch.from_numpy(out), expected)


def test_window() -> None:
    printed = run_lesson("window")
    assert row(printed, "8,000") == ["8,001", "513", "501", "468"]
    assert row(printed, "all layers") == ["7", "yes"]
    assert row(printed, "all but the last one") == ["7", "no"]


def test_errors() -> None:
    """A row that fails costs the other one nothing, and a step that fails costs no known token."""
    printed = run_lesson("errors")
    rows = [line for line in printed.splitlines() if re.match(r"[1-6]  ", line)]
    one, whole = rows[:5], rows[5:]
    assert [line.split()[-4:-1] for line in one[2:]] == [["error,", "with", "2"]] * 3
    assert "3 tokens, 12 computed" in one[2]
    assert whole[2].count("waits, 2 tokens, 0 computed") == 2
    assert whole[3].count("3 tokens, 12 computed") == 2
    assert len(whole) == 6  # one more
    assert whole[5].count("length, with 5 tokens") == 2


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
