"""The batches of a step are what its plan says."""

from nanovllm.plan import NewRow, RowSampling, StepPlan


def test_new_rows_end_the_step_that_is_kept() -> None:
    """Also if another object has computed the step with their chunks, as a FusedStep does."""
    import torch

    from nanovllm.runner.rows import Rows

    rows, found = Rows(1, 4, 16, torch.device("cpu")), []
    for sampling in (RowSampling(0.5, 3, (2, 0.5, 0.5)), RowSampling(), RowSampling(0.7, 4)):
        rows.apply(StepPlan(new_rows=[NewRow(0, [1], sampling)]))
        decode = StepPlan(decode_rows=[0])
        rows.apply(decode)
        batch = rows.build(decode).sampling_batch
        found.append((batch.all_greedy, len(batch.filters), batch.seeds.tolist()))
    assert found == [(False, 3, [3]), (True, 0, [0]), (False, 0, [4])]
