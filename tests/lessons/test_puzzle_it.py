"""The puzzles: hidden lines, right and wrong ones, and what the programs load and store."""

import textwrap
from pathlib import Path

import pytest
import torch

from lessons import puzzle_it

NAMES = [*puzzle_it.HINTS]
LINES = (
    "tl.store(out + tl.program_id(0) * SIZE + tl.arange(0, SIZE), b + a, i < n)",
    "weights = tl.exp(scores) / tl.exp(tl.max(scores, 0)) if False else "
    "tl.exp(scores - 99 - tl.max(scores - 99, 0))",
)
# Of the puzzles of one line, the first with its message.
WRONG = (
    (
        ("tl.store(out + i, a + b)", "2 of 21 numbers are wrong. The first is at [19]: "),
        "tl.store(out, a + b, mask=i < n)",
        "tl.store(out + i, a * b, mask=i < n)",
        "tl.store(x + i, a + b, mask=i < n)",
        "tl.store(out + tl.arange(0, SIZE), a + b, mask=i < n)",
        "tl.store(out + i, a + b, mask=i <= n)",
        "tl.store(out + i, a + b, mask=tl.arange(0, SIZE) < n)",
        "tl.store(out + tl.program_id(0) + tl.arange(0, SIZE), a + b, mask=i < n)",
        "out = a + b",
    ),
    (
        ("weights = tl.exp(scores)", "The first is at [0, 0]: nan came out"),
        "weights = tl.exp(scores - 100)",
        "weights = tl.exp(scores - 1000)",
        "weights = tl.exp(scores - tl.min(scores, 0))",
        "weights = tl.exp(scores - tl.sum(scores, 0))",
        "weights = tl.exp(scores / tl.max(scores, 0))",
        "weights = tl.exp(tl.max(scores, 0) - scores)",
        "weights = tl.exp2(scores - tl.max(scores, 0))",
        "weights = scores - tl.max(scores, 0)",
        "weights = tl.exp(scores - tl.max(scores, 0)) / n + 1",
    ),
)
# Of the others: a piece of the right lines, what replaces it, and a part of the message.
CHANGES = {
    3: (
        ("columns + j", "inner + j", "y[0:12,0:64]"),
        ("tile +=", "tile =", "numbers are wrong"),
        ("range(0, inner, SIZE)", "range(0, columns, SIZE)", "x["),
        ("range(0, inner, SIZE)", "range(0, SIZE, SIZE)", "y[0:16,0:16], -> out"),
        ("range(0, inner, SIZE)", "range(SIZE, inner, SIZE)", "numbers are wrong"),
        ("range(0, inner, SIZE)", "range(0, inner - SIZE, SIZE)", "numbers are wrong"),
        ("k[:, None] * columns + j[None, :]", "k[None, :] * columns + j[:, None]", "wrong"),
        ("inner + k[None", "columns + k[None", "numbers are wrong"),
        ("k = start +", "k =", "x[0:16,0:16], y[0:16,0:16], x[0:16,0:16], y[0:16,0:16]"),
        ("range(0, inner, SIZE)", "range(0, inner)", "numbers are wrong"),
    ),
    4: (
        ("tl.exp(m - new_m)", "1.0", "numbers are wrong"),
        ("tl.exp(m - new_m)", "tl.exp(new_m - m)", "nan came out"),
        ("acc * factor", "acc", "numbers are wrong"),
        ("total * factor", "total", "numbers are wrong"),
        ("    m = new_m\n", "", "numbers are wrong"),
        ('float("-inf")', "0.0", "numbers are wrong"),
        ("tl.maximum(m, tl.max(s, 0))", "tl.max(s, 0)", "nan came out"),
        ("tl.exp(s - new_m)", "tl.exp(s)", "numbers are wrong"),
        (", mask=(i < n)[:, None], other=0.0", "", "values[16:20,0:4] and beyond"),
        ("range(0, n, SIZE)", "range(0, n - SIZE, SIZE)", "values[8:16,0:4], -> out"),
        ("i = start +", "i =", "scores[0:8], values[0:8,0:4], scores[0:8], values[0:8,0:4]"),
    ),
    5: (
        ("tables + s * BLOCKS", "tables", "program 1, 3: q[1,3,0:8], lengths[1], tables[0,0]"),
        ("h // HEADS) * D", "h) * D", "keys[5:9,1,0:8]"),
        ("(heads // HEADS)", "heads", "wrong"),
        ("* BLOCK + position % BLOCK", "* BLOCK + position", "keys[12:16,0,0:8]"),
        ("(s * heads + h)", "(h * 2 + s)", "-> out["),
        ("tl.load(lengths + s)", "tl.load(lengths)", "lengths[0], tables[1,0]"),
        ("tl.where(position < n,", "tl.where(position < n + 1,", "numbers are wrong"),
        ("mask = (position < n)", "mask = (position >= 0)", "nan came out"),
        ("+ start // BLOCK", "+ start", "tables[0,0], keys"),
        ("BLOCKS + start // BLOCK) * BLOCK", "BLOCKS + start // BLOCK)", "keys[5:9,0,0:8]"),
        ("range(0, n, BLOCK)", "range(0, n - BLOCK + 1, BLOCK)", "values[8:12,0,0:8], -> out"),
        ("tl.load(lengths + s)", "8", "values[8:12,0,0:8], -> out"),
        ("heads = tl.num_programs(1)", "heads = HEADS", "q[0,"),
    ),
}


def refused(tmp_path: Path, number: int, lines: str) -> str:
    """The fault of a kernel with these lines, "" if it is right."""
    kernels, name = pytest.importorskip("lessons.puzzles"), NAMES[number - 1]
    file = tmp_path / f"{abs(hash(lines))}.py"  # Triton reads the source of each from its file
    file.write_text(puzzle_it.template(kernels, name, lines))
    return puzzle_it.compare(kernels, name, file)


@pytest.mark.parametrize("number", [1, 2])
def test_lines(number: int, tmp_path, recwarn: pytest.WarningsRecorder) -> None:
    """Another right line than the one that is hidden, wrong ones and nonsense."""
    assert not refused(tmp_path, number, LINES[number - 1])
    (wrong, message), *lines = WRONG[number - 1]
    said = refused(tmp_path, number, wrong)
    assert message in said
    assert said.endswith(f"Hint: {puzzle_it.HINTS[NAMES[number - 1]]}")
    assert "It raises NameError" in refused(tmp_path, number, "out = nonsense")
    assert len(lines) >= 8
    assert [line for line in lines if not refused(tmp_path, number, line)] == []
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]  # NumPy's, of NaN


@pytest.mark.parametrize("number", CHANGES)
def test_wrong_loops_and_kernels_are_refused(number: int, tmp_path) -> None:
    kernels = pytest.importorskip("lessons.puzzles")
    right = textwrap.dedent(puzzle_it.parts(kernels, NAMES[number - 1])[1])
    assert not refused(tmp_path, number, right)
    for piece, replacement, message in CHANGES[number]:
        assert piece in right
        said = " ".join(refused(tmp_path, number, right.replace(piece, replacement)).split())
        assert message in said, (piece, replacement, said)


@pytest.mark.slow
def test_a_kernel_in_a_file(tmp_path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It is written, is not overwritten, and shows what its programs load and store."""
    kernels = pytest.importorskip("lessons.puzzles")
    monkeypatch.chdir(tmp_path)
    puzzle_it.run("1", [])
    line = capfd.readouterr().out.strip()
    puzzle_it.run("1")
    shown = capfd.readouterr().out
    assert line not in shown
    assert "...  # your code" in shown
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 100
    assert torch.cuda.is_available() or "program 2: x[16:19], y[16:19], -> out[16:19]" in " ".join(
        shown.split()
    )
    (file,) = tmp_path.glob("*.py")
    assert f"python -m lessons puzzle 1 --check {file}" in shown
    with pytest.raises(SystemExit):
        puzzle_it.run("1", check=str(file))
    assert "That is not right." in capfd.readouterr().out
    file.write_text(text := puzzle_it.template(kernels, "add", line))
    puzzle_it.run("1", check=str(file))
    assert "That is right" in capfd.readouterr().out
    puzzle_it.run("1")
    assert file.read_text() == text
    file.write_text(puzzle_it.template(kernels, "add", "tl.store(out + 10**12 + i, a + b)"))
    with pytest.raises(SystemExit):
        puzzle_it.run("1", check=str(file))
    if not torch.cuda.is_available():
        assert "It reads or writes where no memory is (SIGSEGV)." in capfd.readouterr().out
