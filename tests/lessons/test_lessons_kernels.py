"""Lessons 10 and 11 and electives: their functions compute what they show, which holds for other numbers too."""

from types import SimpleNamespace

import pytest
import torch
from lesson_runs import run_lesson

from lessons import elective_experts as experts
from lessons import elective_host_cache as host_cache
from lessons import elective_int8 as int8
from lessons import elective_state_cache as state_cache
from lessons import elective_states as states
from lessons import elective_tensor_parallel as tensor_parallel
from lessons import lesson
from lessons import lesson10b_paged_attention as paged
from lessons import lesson11a_overlap as overlap
from lessons import lesson11b_graphs as graphs
from nanovllm.features.models.hybrid.delta_rule import advance, solve


def table(printed: str, head: str) -> list[list[str]]:
    """The cells of the printed table whose first line begins with `head`."""
    lines = printed[printed.index(f"\n{head}  ") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]


def test_lesson_10a() -> None:
    pytest.importorskip("triton")
    printed = run_lesson("10a")
    kernels = lesson.optional("lessons.puzzles")
    x, out = (kernels.place(torch.arange(10.0) * n) for n in (1, 0))
    kernels.double[(3,)](x, out, 10, 4)
    assert torch.equal(out, 2 * x)
    if not torch.cuda.is_available():  # the tiles of a kernel can be read in the interpreter
        tiles = {row[0].split(" = ")[0]: row[1:] for row in table(printed, "line")}
        assert tiles["i"] == ["4 5 6 7", "8 9 10 11"]
        assert tiles["mask"] == ["1 1 1 1", "1 1 0 0"]
        assert tiles["tl.store(out + i, 2 * a, mask=mask)"] == ["80 100 120 140", "160 180 - -"]


@pytest.mark.parametrize("context", [1, 128, 129, 400])
def test_tiles_of_pages_agree_with_a_softmax(context: int) -> None:
    kv, q, blocks = torch.randn(2, 40, paged.BLOCK, 8), torch.randn(8), torch.randperm(40)
    (_, total, acc), rows = paged.attend_tiles(q, paged.paged_tiles(kv, blocks, 0, context))
    assert sum(int(row[0]) for row in rows) == context
    position = torch.arange(context)
    keys, values = kv[:, blocks[position // paged.BLOCK], position % paged.BLOCK]
    torch.testing.assert_close(acc / total, (keys @ q / 8**0.5).softmax(0) @ values)


def test_lesson_10b() -> None:
    pytest.importorskip("triton")
    printed = run_lesson("10b")
    tiles = [[float(cell) for cell in row] for row in table(printed, "keys")]
    assert [row[0] for row in tiles] == [128, 128, 128, 128, 88]
    before = -torch.inf
    for _, largest, m, factor, *_ in tiles:
        assert m == max(before, largest)
        assert factor == pytest.approx(torch.exp(torch.tensor(before - m)).item(), abs=2e-3)
        before = m
    assert {0.0, 1.0} < {row[3] for row in tiles}  # rescaled, and not
    k, v = torch.randn(2, 2 * paged.TILE, 8)
    k[0] = 100 * torch.ones(8)  # the largest score is in the first tile
    factor = paged.attend_tiles(torch.ones(8), zip(k.split(128), v.split(128), strict=True))[1][1]
    assert float(factor[3]) == float(paged.QUESTIONS[0].answer)


def test_lesson_11a() -> None:
    """Overlap hides the host, and drops a token of the request that stops at a token."""
    run_lesson("11a")
    for asynchronous, least in ((False, 8), (True, 5)):
        device, outputs, ms = overlap.serve(asynchronous)
        assert sorted(outputs) == [[*range(1, 19)], [*range(1, 41)]]
        assert device.sampled == 58 + asynchronous
        assert ms >= least


def test_lesson_11b() -> None:
    """A replay is one launch, and repeats what was recorded."""
    printed = run_lesson("11b")
    steps = [row[1:] for row in table(printed, "what the host does")]
    assert steps == [["1", "1 0 0 1 0 1 0 0"], ["1", "2 0 0 2 0 2 0 0"], ["1", "2 1 1 2 1 2 0 0"]]
    assert graphs.QUESTIONS[0].answer == str(280 * graphs.LAUNCH)
    assert graphs.KERNEL < graphs.LAUNCH


def test_rounding_loses_half_a_step_at_most() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    for bits, by_row in int8.ROUNDINGS:
        steps = 2 ** (bits - 1) - 1
        lost = (int8.rounded(weight, bits, by_row) - weight).abs()
        largest = weight.abs().amax(1) if by_row else weight.abs().max()
        assert (lost.amax(1) <= 0.5001 * largest / steps).all()
        assert lost.max() > 0.3 * weight.abs().max() / steps


@pytest.mark.slow
def test_int8(capsys, monkeypatch) -> None:
    monkeypatch.setattr(int8, "SAMPLES", int8.SAMPLES[::8])
    int8.run()
    printed = capsys.readouterr().out
    errors = [float(row[1].removesuffix("%")) for row in table(printed, "weights")]
    assert errors[0] == 0 < errors[1]
    assert errors == sorted(errors)
    right = [int(row[2].split(" of ")[0]) for row in table(printed, "weights")]
    assert right[5] > 2 * right[6]  # 3 bits need a scale for each row
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_host_cache() -> None:
    printed = run_lesson("host_cache")
    text = " ".join(printed.split())
    assert f"After B and A, {host_cache.QUESTIONS[0].answer} more blocks are saved." in text


@pytest.mark.slow
def test_tensor_parallel() -> None:
    printed = run_lesson("tensor_parallel")
    parts = [[float(x) for x in row[1:]] for row in table(printed, "result")]
    for first, second, both, whole in zip(*parts, strict=True):
        assert first + second == pytest.approx(both, abs=2e-4)
        assert both == pytest.approx(whole, abs=2e-4)
    one, *both = (row[1:] for row in table(printed, "process"))
    assert one == ["4", "2", "12.3", "0", "12 + 30 = 42"]
    assert both == [["2", "1", "6.1", tensor_parallel.QUESTIONS[1].answer, one[-1]]] * 2


def test_states() -> None:
    printed = run_lesson("states")
    reads = [[float(cell) for cell in row[3:]] for row in table(printed, "token")]
    # By hand: c = 10 finds 0.6 * 2.5 + 0.8 * 3 = 3.9, and adds 6.1 times its key.
    last = [2.5 + 0.6 * 6.1, 3 + 0.8 * 6.1, 12.5]
    assert reads == [[4, 0, 4], [4, 6, 4], [8, 6, 12], [5, 6, 13], [2.5, 3, 6.5], last]


def test_a_state_is_corrected_as_in_the_engine() -> None:
    q, k, v = torch.randn(3, 1, 1, 8)
    state, sizes = torch.randn(1, 8, 8), SimpleNamespace(sizes=(1, 1, 8, 8))
    wanted = states.correct(state[0], k[0, 0], v[0, 0], 0.3, 0.5)
    beta, g = torch.tensor([[[0.3]], [[0.5]]]).unbind()
    advance(solve(sizes, torch.cat((q, k, v), dim=2)[0], beta, g.log()), state)
    torch.testing.assert_close(state[0], wanted)


def test_state_cache() -> None:
    printed = run_lesson("state_cache")
    assert table(printed, "request") == [
        ["1", "17", "0", "0", "17", "16"],
        ["2", "17", "12", "0", state_cache.QUESTIONS[0].answer, "12, 16"],
        ["3", "17", "12", "12", "5", "16"],
    ]
    engine = state_cache.Engine(block_size=16)
    engine.run([*range(20)], 30)
    assert str(len(engine.snapshots())) == state_cache.QUESTIONS[1].answer


def test_experts() -> None:
    printed = run_lesson("experts")
    _, two, *_, many = table(printed, "requests")
    assert two[1] == experts.QUESTIONS[1].answer
    assert float(many[2]) == pytest.approx(61, rel=0.02)
