"""Generate: a class for `map_batches` of Ray Data (pip install -e '.[ray]').

docs/jobs.md has an example and lists the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.cli.jobs.openai_format import chat_prompt
from nanovllm.cli.jobs.openai_responses import checked_output
from nanovllm.config import EMBEDDED
from nanovllm.engine.request import Request
from nanovllm.utils.checks import check_scalar

# Input columns. A dataset has exactly one of them.
PROMPTS = ("prompt", "prompt_token_ids", "messages")
# Output columns. Their types are fixed, so that all files of a dataset have one schema.
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("reasoning", pa.string()),  # with the option reasoning_parser
        ("token_ids", pa.list_(pa.int64())),
        ("finish_reason", pa.string()),
        ("num_prompt_tokens", pa.int64()),
        ("num_cached_tokens", pa.int64()),
        ("time_to_first_token", pa.float64()),  # seconds since the batch was given
        ("time_to_finish", pa.float64()),
        ("error", pa.string()),  # null without an error; with one, the other columns are null
    ]
)


class Generate:
    """Completes the prompts of a dataset."""

    def __init__(
        self,
        model: str = EMBEDDED,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load a model in a worker of Ray.

        model, options: as in LLM().
        sampling_params: fields of SamplingParams for all rows. Fields in the column
            `sampling_params` of a row take precedence. If both are missing, the fields of
            generation_config.json apply.
        """
        self.sampling_params = dict(sampling_params or {})
        make_params(self.sampling_params)  # checks them
        self.llm = LLM(model, **options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Complete the prompts of a batch [N rows]. Returns it with the columns of SCHEMA.

        An error of one row is reported in its column `error`. Raises TypeError or ValueError if the
        batch cannot be read, and any error of the engine if it fails.
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
        columns_to_read = [n for n in (*names, "sampling_params") if n in batch.column_names]
        results: list[Request | Exception] = []
        requests: list[Request] = []
        try:
            for row in batch.select(columns_to_read).to_pylist():
                try:
                    requests.append(self._submit(names[0], row))
                    results.append(requests[-1])
                except (TypeError, ValueError, ImportError) as error:
                    results.append(error)
            for _ in self.llm.engine.run(requests):
                pass
        finally:  # requests are left after an error only
            self.llm.engine.abort(requests)
        columns = pa.Table.from_pylist([as_row(result) for result in results], SCHEMA)
        for field, column in zip(SCHEMA, columns.columns, strict=True):
            batch = batch.append_column(field, column)
        return batch

    def _submit(self, name: str, row: dict[str, Any]) -> Request:
        prompt = without_nulls(row[name])
        row_fields = without_nulls(row.get("sampling_params") or {})
        check_scalar("sampling_params", row_fields, dict)
        fields = self.sampling_params | row_fields
        if fields.get("n", 1) != 1:
            raise ValueError(f"n must be 1, not {fields['n']!r}: repeat the row instead")
        if name == "messages":
            prompt = chat_prompt(self.llm, {"messages": prompt})
        return self.llm.engine.submit(prompt, make_params(fields) if fields else None)


def make_params(fields: dict[str, Any]) -> SamplingParams:
    """Return SamplingParams from fields in the types of Arrow.

    structured_outputs may be a struct. logit_bias may be a map, which is a list of pairs, or a
    struct with token ids as names.
    """
    fields = dict(fields)
    if isinstance(grammar := fields.get("structured_outputs"), Mapping):
        fields["structured_outputs"] = StructuredOutputsParams(**grammar)
    if isinstance(bias := fields.get("logit_bias"), list):
        fields["logit_bias"] = dict(bias)
    return SamplingParams(**fields)


def as_row(result: Request | Exception) -> dict[str, Any]:
    """Return the values of SCHEMA. Missing values are null."""
    try:
        if isinstance(result, Exception):
            raise result
        output = checked_output(result)
    except Exception as error:
        return {"error": str(error)}
    metrics = output.metrics
    (sample,) = output.outputs
    return {
        "text": sample.text,
        "reasoning": sample.reasoning,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "time_to_first_token": metrics.first_token_time - metrics.arrival_time,
        "time_to_finish": metrics.finished_time - metrics.arrival_time,
    }


def without_nulls(value: Any) -> Any:
    """Remove fields that are null. Arrow adds them, because all structs of a column have the same
    fields.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
