"""The class for Ray Data: columns in and out, errors of rows, and a worker that is killed."""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams

pa = pytest.importorskip("pyarrow", reason="pip install -e '.[ray]'")

from nanovllm.cli.jobs.ray_data import SCHEMA, Generate  # noqa: E402

QUESTIONS = [f"What is {i} + {i + 3}?" for i in range(40)]
PARAMS = {"temperature": 0.0, "max_tokens": 12}


def chat(question):
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def expected():
    outputs = LLM().chat([*map(chat, QUESTIONS)], SamplingParams(**PARAMS), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def generate():
    return Generate(sampling_params=PARAMS)


def test_messages_are_answered_in_the_order_of_the_rows(generate, expected):
    batch = pa.table({"row": range(40), "messages": [*map(chat, QUESTIONS)]})
    result = generate(batch)
    assert result.column_names == ["row", "messages", *SCHEMA.names]
    assert result.select(SCHEMA.names).schema == SCHEMA
    rows = result.to_pylist()
    assert [row["row"] for row in rows] == [*range(40)]
    for row, output in zip(rows, expected, strict=True):
        assert (row["text"], row["token_ids"]) == (output.text, output.token_ids)
        assert (row["finish_reason"], row["error"]) == (output.finish_reason, None)
        assert 0 < row["time_to_first_token"] <= row["time_to_finish"]
    assert sum(row["num_cached_tokens"] for row in rows) <= sum(
        r["num_prompt_tokens"] for r in rows
    )


def test_what_is_wrong_with_a_row_is_in_its_error(generate):
    params = [{"max_tokens": 3}, {"max_tokens": -1}, {"allowed_token_ids": [5]}, {"n": 2}, None]
    result = generate(pa.table({"prompt": ["Spell a\n"] * 5, "sampling_params": params}))
    rows = result.to_pylist()
    assert [row["error"] is None for row in rows] == [True, False, True, False, True]
    assert len(rows[0]["token_ids"]) == 3
    assert "max_tokens" in rows[1]["error"]
    assert rows[1]["text"] is None
    assert set(rows[2]["token_ids"]) == {5}
    assert "repeat the row" in rows[3]["error"]
    assert rows[4]["finish_reason"] in ("stop", "length")


def test_structured_outputs_and_biases_of_rows(generate):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}}
    schema |= {"required": ["sum"], "additionalProperties": False}
    structs = [{"regex": "[ab]{3}"}, {"choice": ["yes", "no"]}, {"json": json.dumps(schema)}]
    structs += [None, {"regex": "a", "choice": ["b"]}, {"regex": "("}]
    params = [{"structured_outputs": one, "min_tokens": 1} for one in structs]
    batch = pa.table({"prompt": ["Spell a\n"] * 6, "sampling_params": params})
    rows = generate(batch).to_pylist()
    assert re.fullmatch("[ab]{3}", rows[0]["text"])
    assert rows[1]["text"] in ("yes", "no")
    assert json.loads(rows[2]["text"])["sum"] in (1, 2)
    assert rows[3]["text"]
    assert "exactly one" in rows[4]["error"]
    assert "regex" in rows[5]["error"]
    params = [{"structured_outputs": {"json": schema}}] * 2  # a schema that is a struct itself
    rows = generate(pa.table({"prompt": ["a"] * 2, "sampling_params": params})).to_pylist()
    assert {json.loads(row["text"])["sum"] for row in rows} <= {1, 2}

    biases = pa.array([[(5, 100.0)], [(7, 100.0)]], pa.map_(pa.int64(), pa.float64()))
    params = pa.StructArray.from_arrays([biases], ["logit_bias"])
    rows = generate(pa.table({"prompt": ["a"] * 2, "sampling_params": params})).to_pylist()
    assert [set(row["token_ids"]) for row in rows] == [{5}, {7}]
    params = [{"logit_bias": {"5": 100.0}}, {"logit_bias": {"7": 100.0}}]
    rows = generate(pa.table({"prompt": ["a"] * 2, "sampling_params": params})).to_pylist()
    assert [set(row["token_ids"]) for row in rows] == [{5}, {7}]
    params = [{"logit_bias": {"x": 100.0}}, None]
    rows = generate(pa.table({"prompt": ["a"] * 2, "sampling_params": params})).to_pylist()
    assert "token id of logit_bias must be an int, not 'x'" in rows[0]["error"]
    assert rows[1]["error"] is None


def test_structured_outputs_of_all_rows():
    pytest.importorskip("llguidance")
    llm = Generate(sampling_params={**PARAMS, "structured_outputs": {"choice": ["yes", "no"]}})
    rows = llm(pa.table({"prompt": ["a", "b"]})).to_pylist()
    assert {row["text"] for row in rows} <= {"yes", "no"}
    with pytest.raises(ValueError, match="exactly one"):
        Generate(sampling_params={"structured_outputs": {}})


def test_thinking_is_a_column():
    llm = Generate(sampling_params=PARAMS, reasoning_parser="qwen3")
    rows = llm(pa.table({"prompt": ["2 + 3?\n<think>\n", "2 + 3?\n"]})).to_pylist()
    assert rows[0]["reasoning"]
    assert rows[0]["text"] == ""
    assert rows[1]["reasoning"] is None
    assert rows[1]["text"]


@pytest.mark.parametrize("ids", [[], [10**9]])
def test_token_ids_that_are_refused(generate, ids):
    rows = generate(pa.table({"prompt_token_ids": [[1, 2, 3], ids]})).to_pylist()
    assert rows[0]["error"] is None
    assert rows[1]["error"]
    assert generate.llm.stats()["running"] == 0


def test_a_batch_that_cannot_be_read(generate):
    with pytest.raises(TypeError, match='batch_format="pyarrow"'):
        generate({"prompt": ["a"]})
    with pytest.raises(ValueError, match="one of the columns prompt, prompt_token_ids, messages"):
        generate(pa.table({"question": ["a"]}))
    with pytest.raises(ValueError, match="rename the columns text"):
        generate(pa.table({"prompt": ["a"], "text": ["b"]}))
    with pytest.raises(TypeError, match="max_token"):
        Generate(sampling_params={"max_token": 3})


class KilledOnce(Generate):
    """Kills its process after one batch, unless `marker` says that one did so already."""

    def __init__(self, marker, **options):
        super().__init__(**options)
        self.marker = Path(marker)

    def __call__(self, batch):
        result = super().__call__(batch)
        with contextlib.suppress(FileExistsError):
            self.marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return result


@pytest.mark.slow
def test_every_row_is_there_once_after_a_worker_was_killed(tmp_path, expected):
    ray = pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    from pyarrow import parquet
    from ray import data as ray_data

    # The workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    (tmp_path / "in").mkdir()
    for part in range(8):  # a block each
        rows = range(part * 5, part * 5 + 5)
        table = pa.table({"row": rows, "messages": [chat(QUESTIONS[i]) for i in rows]})
        parquet.write_table(table, tmp_path / "in" / f"{part}.parquet")
    marker = tmp_path / "killed"
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        data = ray_data.read_parquet(str(tmp_path / "in"))
        data = data.map_batches(
            KilledOnce,
            fn_constructor_kwargs={"marker": str(marker), "sampling_params": PARAMS},
            batch_format="pyarrow",
            batch_size=5,
            compute=ray_data.ActorPoolStrategy(size=2),
        )
        data.write_parquet(str(tmp_path / "out"))
    finally:
        ray.shutdown()
    assert marker.exists()
    rows = parquet.read_table(tmp_path / "out").sort_by("row").to_pylist()
    assert [row["row"] for row in rows] == [*range(40)]
    assert [row["token_ids"] for row in rows] == [output.token_ids for output in expected]
