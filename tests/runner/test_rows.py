"""The batches of a step are what its plan says."""

import pytest

from lessons.oracle.oracle import History, OracleRunner
from nanovllm.plan import NewRow, RowSampling, StepPlan


@pytest.mark.slow
def test_rows_build_what_the_plan_says() -> None:
    """The runner's batches equal the oracle's reading of the same plans, in 200 histories."""
    import numpy as np
    import torch

    from nanovllm.runner.rows import Rows

    class Both(OracleRunner):
        def run(self, plan: StepPlan) -> list[int]:
            self.rows.apply(plan)
            step = self.rows.build(plan)
            batch, sampling = step.forward_batch, step.sampling_batch
            positions = list(self.positions)
            drawn = super().run(plan)
            work = [(c.row, c.start, c.token_ids, c.result_kind is not None) for c in plan.chunks]
            for row in plan.decode_rows:
                work.append((row, positions[row], [self.before[row]], True))
            ids = [t for _, _, tokens, _ in work for t in tokens]
            assert batch.input_ids.tolist() == ids
            at = [(row, start + i) for row, start, tokens, _ in work for i in range(len(tokens))]
            assert batch.positions.tolist() == [p for _, p in at]
            assert batch.slot_mapping.tolist() == [self.slot(row, p) for row, p in at]
            ends = np.cumsum([len(tokens) for _, _, tokens, _ in work])
            assert batch.query_start_loc.tolist() == [0, *ends]
            assert batch.context_lens.tolist() == [start + len(t) for _, start, t, _ in work]
            draws = [
                (e - 1, r, s + len(t)) for e, (r, s, t, d) in zip(ends, work, strict=True) if d
            ]
            assert step.logits_indices.tolist() == [e for e, _, _ in draws]
            assert sampling.seeds.tolist() == [self.seeds[row] for _, row, _ in draws]
            assert sampling.positions.tolist() == [p for _, _, p in draws]
            self.rows.record(step.sampling_rows, torch.tensor(drawn, dtype=torch.int64))
            self.before = list(self.last)
            return drawn

    for seed in range(200):
        history = History(seed)
        runner = Both(history.num_blocks, history.size, history.max_num_seqs)
        runner.before = [0] * history.max_num_seqs
        runner.rows = Rows(history.max_num_seqs, 40, history.size, torch.device("cpu"))
        history.runner = runner
        for _ in range(40):
            history.rng.choice((History.step, History.step, History.add, History.abort))(history)
        history.drain()


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
