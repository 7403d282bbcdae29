"""Ray Data: the class that `map_batches` takes (pip install -e '.[ray]').

    data = ray.data.read_parquet("in.parquet").repartition(target_num_rows_per_block=1024)
    data = data.map_batches(
        Generate,
        fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "sampling_params": {"max_tokens": 100}},
        batch_format="pyarrow",
        batch_size=1024,
        compute=ray.data.ActorPoolStrategy(size=2),  # workers
        num_gpus=1,  # for each
    )
    data.write_parquet("out")

docs/jobs.md lists the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.api.checks import check_scalar
from nanovllm.api.config import EMBEDDED
from nanovllm.engine.request import Request
from nanovllm.tools.jobs.openai_format import chat_prompt, check_end

# The names of input columns, of which a dataset has one.
PROMPTS = "prompt", "prompt_token_ids", "messages"
# The columns that are added. Their types are fixed, so that all files of a dataset have one schema.
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("finish_reason", pa.string()),
        ("num_prompt_tokens", pa.int64()),
        ("num_cached_tokens", pa.int64()),
        ("time_to_first_token", pa.float64()),  # seconds since the batch was given
        ("time_to_finish", pa.float64()),
        ("error", pa.string()),  # null if there is none; all other columns are null if there is one
    ]
)


class Generate:
    def __init__(
        self,
        model: str = EMBEDDED,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load a model in a worker of Ray.

        model, options: as in LLM().
        sampling_params: fields of SamplingParams for all rows. The fields in a row's own column
            `sampling_params` take precedence. Without any, those of generation_config.json apply.
        """
        self.sampling_params = dict(sampling_params or {})
        make_params(self.sampling_params)  # raises what is wrong with them
        self.llm = LLM(model, **options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Complete the prompts of a batch [N rows]. Returns it with the columns of SCHEMA.

        What is wrong with one row is reported in its column `error`. Raises TypeError or ValueError
        if the batch cannot be read, and what the engine raises if it fails.
        """
        if not isinstance(batch, pa.Table):
            raise TypeError(
                f"a batch must be a pyarrow.Table, not {type(batch).__name__}; pass "
                'batch_format="pyarrow" to map_batches'
            )
        names = [name for name in batch.column_names if name in PROMPTS]
        if len(names) != 1:
            raise ValueError(
                f"a dataset needs one of the columns {', '.join(PROMPTS)}; this one has "
                f"{', '.join(batch.column_names)}"
            )
        if taken := [name for name in batch.column_names if name in SCHEMA.names]:
            raise ValueError(f"rename the columns {', '.join(taken)}: results get these names")
        wanted = [name for name in (*names, "sampling_params") if name in batch.column_names]
        results: list[Request | Exception] = []
        try:
            for row in batch.select(wanted).to_pylist():
                try:
                    results.append(self._submit(names[0], row))
                except (TypeError, ValueError, ImportError) as error:
                    results.append(error)
            for _ in self.llm.engine.run([r for r in results if isinstance(r, Request)]):
                pass
        finally:  # of those that an error has left
            self.llm.engine.abort(r for r in results if isinstance(r, Request))
        columns = pa.Table.from_pylist([as_row(result) for result in results], SCHEMA)
        for field, column in zip(SCHEMA, columns.columns, strict=True):
            batch = batch.append_column(field, column)
        return batch

    def _submit(self, name: str, row: dict[str, Any]) -> Request:
        prompt, own = without_nulls(row[name]), without_nulls(row.get("sampling_params") or {})
        check_scalar("sampling_params", own, dict)
        fields = self.sampling_params | own
        if fields.get("n", 1) != 1:
            raise ValueError(f"n must be 1, not {fields['n']!r}: repeat the row instead")
        if name == "messages":
            prompt = chat_prompt(self.llm, {"messages": prompt})
        return self.llm.engine.submit(prompt, make_params(fields) if fields else None)


def make_params(fields: dict[str, Any]) -> SamplingParams:
    """Fields may have the types that Arrow has for them: structured_outputs a struct with its fields,
    logit_bias a map, or a struct whose names are token ids.
    """
    fields = dict(fields)
    if isinstance(own := fields.get("structured_outputs"), Mapping):
        fields["structured_outputs"] = StructuredOutputsParams(**own)
    if isinstance(bias := fields.get("logit_bias"), Mapping | list):
        pairs = dict(bias).items()
        fields["logit_bias"] = {int(t) if str(t).isdecimal() else t: x for t, x in pairs}
    return SamplingParams(**fields)


def as_row(result: Request | Exception) -> dict[str, Any]:
    """Return the values of SCHEMA; those that are left out are null."""
    try:
        if isinstance(result, Exception):
            raise result
        check_end(result)
    except Exception as error:
        return {"error": str(error)}
    output, metrics = result.output, result.output.metrics
    (sample,) = output.outputs
    return {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "time_to_first_token": metrics.first_token_time - metrics.arrival_time,
        "time_to_finish": metrics.finished_time - metrics.arrival_time,
    }


def without_nulls(value: Any) -> Any:
    """Arrow gives all structs of a column the same fields; a null stands for a field left out."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
