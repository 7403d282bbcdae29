"""bench.py --gpu-report: its parts on a model of a GPU, its limits, and what it writes."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_module import bench
from fresh import ROOT, on_model

from nanovllm.utils.child import python
from tools.benchmarks.gpu import pytests, report, rows
from tools.benchmarks.gpu.report import PARTS, Part, Run
from tools.benchmarks.gpu.rows import HEADLINE, Row


@pytest.fixture(scope="module")
def dry() -> dict[str, Any]:
    """What dry_report.py found."""
    return on_model([sys.executable, "tests/helpers/dry_report.py"])


@pytest.mark.slow
def test_every_part_runs_on_the_model_of_a_gpu(dry: dict[str, Any]) -> None:
    runs = dry["runs"]
    assert [run["part"] for run in runs] == [i for i, part in enumerate(PARTS) for _ in part.runs]
    for run in runs:
        assert any(row.get(HEADLINE) for row in run["rows"]), run["run"]
        assert None not in [x for row in run["rows"] for x in row.values()], run
    found = {name for run in runs for row in run["rows"] for name in row}
    assert {
        "empty kernel",
        "chain",
        "product",
        "decode",
        "kernel",
        "step",
        "workload",
        "peer",
    } < found
    table = [row for run in runs for row in run["rows"] if row.get(HEADLINE)]
    assert len(table) < 60


@pytest.mark.slow
def test_the_probe_loads_its_weights_before_or_after_the_wait(dry: dict[str, Any]) -> None:
    """A program of 8 warps has 8 rows of 512 weights: each thread loads 16 bytes twice."""
    early, late = dry["loads"]["True"], dry["loads"]["False"]
    assert early[0] == 2
    assert late[0] == 0
    assert sum(late) == sum(early) == 4  # and twice from x


def test_the_first_parts_take_at_most_nine_minutes() -> None:
    assert sum(part.limit for part in PARTS[:7]) <= 540
    for part in PARTS:
        limits = [run.options["limit"] for run in part.runs if run.module == "pytests"]
        assert sum(limits) < part.limit


def test_the_documents_name_the_parts_and_their_limits() -> None:
    text = (ROOT / "docs/measurements.md").read_text()
    for number, part in enumerate(PARTS):
        assert f"\n| {number} | {part.title} | {part.limit} s |" in text


def test_the_tests_of_kernels_have_the_names_that_the_report_selects() -> None:
    tree = ast.parse((ROOT / "tests/backends/gpu/test_gpu.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    logic = r"and|or|not|bfloat16|(True|False)-\d+"
    marked = [
        path for path in (ROOT / "tests").rglob("*.py") if "mark." + "gpu" in path.read_text()
    ]
    assert {path.parent for path in marked} == {ROOT / pytests.TESTS[0]}
    for selection in (report.KERNEL_TESTS, *report.HALF):
        words = re.findall(r"[\w-]+", selection)
        for word in (word for word in words if not re.fullmatch(logic, word)):
            assert any(word in name for name in names if name.startswith("test_")), word


def fake(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    """Replace the parts; a run's module is the code of its process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "PARTS", parts)
    monkeypatch.setattr(Run, "command", lambda run: python(run.module))


ROW = "import json; print(json.dumps({'product': 'o', 'us': 1234.5, 'in the table': True}), flush=True)"
SLEEPS = f"import subprocess; sleep = subprocess.Popen(['sleep', '60']); {ROW}; sleep.wait()"


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if what it has started keeps its output open."""
    sampler = tmp_path / "nvidia-smi"
    sampler.write_text("#!/bin/sh\necho 90, 1980, 650.5, 45\necho 0, 345, 70, 30\nexec sleep 60\n")
    sampler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    raises, sleeps, row = Run("print('1 %\\r{no row'); raise SystemExit(3)"), Run(SLEEPS), Run(ROW)
    fake(
        monkeypatch,
        Part("fails", 60, [raises, row]),
        Part("has no time", 0, [row]),
        Part("takes too long", 59, [sleeps]),
        Part("last", 60, [row]),
    )
    parse = rows.parse

    class LimitAtFirstRow:
        """The limit of 59 s is reached when the process has printed its row."""

        def __init__(self, limit: float, function: Any, args: Any) -> None:
            def parsed(line: str) -> Row | None:
                if 50 < limit < 59:
                    function(*args)
                return parse(line)

            monkeypatch.setattr(report, "parse", parsed)

        def start(self) -> None:
            pass

        cancel = start

    monkeypatch.setattr(report, "Timer", LimitAtFirstRow)
    file = tmp_path / "report.txt"
    assert bench.main(["--gpu-report", str(file)]) == 0
    text = file.read_text()
    assert "\n{no row\n" in text
    assert text in capsys.readouterr().out
    found = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    ends = [row for row in found if "title" in row]
    statuses = [f"{raises}: exit status 3", f"{row}: not started", f"{sleeps}: reached the limit"]
    assert [end["status"] for end in ends] == [*statuses, "ok"]
    assert ends[2]["seconds"] < 30
    assert (ends[0]["MHz"], ends[0]["W"]) == (1980, 650.5)
    table = text.partition("== table\n")[2]
    assert [line[0] for line in table.splitlines() if "us 1,234" in line] == ["0", "2", "3"]


def test_only_some_parts_and_what_ctrl_c_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(line: str) -> Row | None:
        if line == "Ctrl-C":
            raise KeyboardInterrupt
        return rows.parse(line)

    monkeypatch.setattr(report, "parse", interrupted)
    slow = "print('Ctrl-C', flush=True); import time; time.sleep(60)"
    fake(
        monkeypatch,
        *(Part(f"of {code[:5]}", 60, [Run(code)]) for code in ("1 / 0", ROW, slow, ROW)),
    )
    file = tmp_path / "report.txt"
    with pytest.raises(SystemExit, match="130"):
        bench.main(["--gpu-report", str(file), "--only", "1", "2", "3"])
    table = file.read_text().partition("== table\n")[2]
    assert [line[:8] for line in table.splitlines()] == ["1  of im", "2  of pr", "", "1  o  us"]
    assert "interrupted" in table
    kept = file.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["part"] for line in kept] == [1, 1, 2]


def test_parts_of_pytest_run_together_and_stop_at_their_limit(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, time; print('== 3 passed =='); time.sleep(60 * (sys.argv[2] == 'slow'))"
    monkeypatch.setattr(pytests, "COMMAND", [sys.executable, "-uc", code])
    now = 0.0
    monkeypatch.setattr(pytests, "monotonic", lambda: now)
    found = pytests.rows(["fast", "slow"], 50)
    assert next(found)["result"] == "3 passed"
    now = 50
    assert next(found)["result"].startswith("stopped after 50 s at ")
    with pytest.raises(SystemExit):
        next(found)
    assert "== 3 passed ==" in capfd.readouterr().out


def test_rows_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows.headline({"by": "cublas", "us": 20509.4, "share": 0.123456, "GB/s": float("nan")})
    values = {name: rows.rounded(value) for name, value in row.items()}
    assert rows.parse(json.dumps(values)) == values
    assert rows.text(values) == "cublas  us 20,510  share 0.1235  GB/s failed"
    assert [rows.parse(line) for line in ("{}", "{no", "[1]", "")] == [{}, None, None, None]
