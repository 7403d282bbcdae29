"""A scheduler with the oracle's runner: an engine without a model."""

from lessons.oracle.oracle import OracleRunner, answer, make_samples
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import StepPlan


def sequence(prompt: list[int], new: int, arrival: int = 0, seed: int = 0, n: int = 1) -> Sequence:
    return make_samples(prompt, len(prompt) + new, arrival, range(seed, seed + n))[0]


def plain_sequence(token_ids: list[int]) -> Sequence:
    return make_samples(token_ids, 99)[0]


class Engine:
    """A scheduler and its oracle, in the engine's order of calls."""

    def __init__(
        self, blocks: int, size: int, seqs: int, budget: int, policy: str = "fcfs"
    ) -> None:
        self.block_manager = BlockManager(blocks, size)
        self.scheduler = Scheduler(self.block_manager, seqs, budget, policy)
        self.runner = OracleRunner(blocks, size, seqs)
        self.plans: list[StepPlan] = []
        self.finished: list[Sequence] = []

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)

    def step(self) -> StepPlan:
        step = self.scheduler.schedule()
        assert step is not None
        plan = step.plan
        updated = self.scheduler.commit(step, self.runner.run(plan))
        self.finished += [s for s in updated if s.status is Status.FINISHED]
        self.plans.append(plan)
        return plan

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()
        assert self.block_manager.num_available == self.block_manager.num_blocks


def right(seq: Sequence) -> bool:
    prompt = seq.token_ids[: seq.num_prompt]
    return seq.output_ids == answer(prompt, seq.max_length, seq.stop_token_ids, seq.sampling.seed)
