"""Histories of the oracle with beam searches."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from host_cache_history import HostCacheHistory
from xxhash import xxh64_intdigest

from lessons.oracle.oracle import ALPHABET, History, require
from nanovllm.engine import scheduler
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.features.tasks.beam_search import BeamSearch
from nanovllm.plan import ResultKind, RowResult, StepPlan
from nanovllm.sampling_params import BeamSearchParams

Candidates = list[tuple[int, float]]


def candidates(pairs: list[tuple[int, int]]) -> Candidates:
    def logprob(token: int) -> float:
        return -xxh64_intdigest(repr((pairs, token)).encode()) / 2**62

    return sorted(((t, logprob(t)) for t in range(ALPHABET)), key=lambda pair: -pair[1])


def definition(
    prompt: list[int], max_length: int, stops: frozenset[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """(tokens, sum) of the finished beams, the best first, by the rules of transformers."""
    width, beams, finished = params.beam_width, [(0.0, list(prompt))], []
    while beams:
        ranked = sorted(
            (
                (score + logprob, [*ids, token])
                for score, ids in beams
                for token, logprob in candidates([(t, i) for i, t in enumerate(ids)])
            ),
            key=lambda beam: -beam[0],
        )[: max(2, 1 + len(stops)) * width]
        length = len(ranked[0][1]) - len(prompt)
        ends = [ids[-1] in stops or len(ids) >= max_length for _, ids in ranked]
        for end, (score, ids) in list(zip(ends, ranked, strict=True))[:width]:
            if end:
                finished.append((score / length**params.length_penalty, score, ids))
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        beams = [beam for end, beam in zip(ends, ranked, strict=True) if not end][:width]
        full = len(finished) == width
        if beams and full and beams[0][0] / length**params.length_penalty <= finished[-1][0]:
            break
    return [(ids, score) for _, score, ids in finished]


class BeamHistory(History):
    def __init__(self, seed: int, schedulers=scheduler) -> None:
        super().__init__(seed, schedulers)
        self.searches: list[tuple[Request, list[int], int]] = []

    def search(self) -> None:
        rng, room = self.rng, self.num_blocks * self.size
        longest = rng.randint(2, min(room + 1, 20))
        prompt = [rng.randrange(ALPHABET) for _ in range(rng.randint(1, longest - 1))]
        stops = frozenset({rng.randrange(ALPHABET)} if rng.random() < 0.6 else ())
        width = rng.randint(1, min(3, self.max_num_seqs))
        params = BeamSearchParams(width, 99, not stops, length_penalty=rng.choice((0.0, 1.0)))
        inputs: Any = SimpleNamespace(vocab_size=ALPHABET, eos_token_ids=stops, tokenizer=None)
        task: Any = BeamSearch(inputs, params, self.scheduler)
        request = Request(task, None, Progress())
        seq = Sequence("", self.arrivals, list(prompt), len(prompt), longest)
        seq.request, seq.result_kind = request, task.result_kind
        request.samples = [Sample(seq)]
        task.start(request)
        self.arrivals += 1
        self.searches.append((request, prompt, longest))
        self.scheduler.add(seq)

    def run(self, plan: StepPlan) -> tuple[list[int], dict[int, Candidates]]:
        """Tokens of the rows that sample, candidates of the others."""
        drawn = iter(self.runner.run(plan))
        tokens, found = [], {}
        for chunk in plan.chunks:
            if chunk.result_kind is not None:
                token = next(drawn)
                if chunk.result_kind is ResultKind.TOKEN:
                    tokens.append(token)
                else:
                    found[chunk.row] = candidates(list(self.runner.context(chunk.row)))
        return [*tokens, *drawn], found

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            self.pending.append((step, self.run(step.plan)))
        while len(self.pending) > (self.async_scheduling if step is not None else 0):
            step_, (tokens, found) = self.pending.popleft()
            self.scheduler.commit(step_, tokens)
            for row, likely in found.items():
                seq = step_.seqs[row]
                if seq.status is not Status.FINISHED:
                    request = seq.request
                    request.task.receive(request, seq, RowResult(candidates=likely))
        self.steps += 1

    def abort_search(self) -> None:
        if self.searches:
            request, *_ = self.rng.choice(self.searches)
            for sample in request.samples:
                self.scheduler.finish(sample.seq, "abort")

    def beams(self) -> Iterator[Sequence]:
        for request, *_ in self.searches:
            yield from (sample.seq for sample in request.samples)

    def check(self) -> None:
        super().check()
        for seq in self.beams():
            if seq.status is Status.RUNNING:
                self.check_context(seq)
            else:
                require(not seq.block_table, "owners", "a beam that does not run owns blocks")

    def drain(self) -> None:
        bound = self.steps + 200 + 40 * (len(self.seqs) + 6 * len(self.searches)) * 4
        while self.scheduler.has_work():
            self.step()
            self.check()
            require(self.steps < bound, "progress")
        super().drain()
        for request, prompt, longest in self.searches:
            search = request.task
            require(all(s.status is Status.FINISHED for s in self.beams()), "progress")
            if any(sample.seq.finish_reason == "abort" for sample in request.samples):
                continue
            stops = search.stops
            want = definition(prompt, longest, stops, search.params)
            found = search.output(request).sequences
            trimmed = [ids[:-1] if ids[-1] in stops else ids for ids, _ in want]
            require([beam.tokens for beam in found] == trimmed, "answers", f"{found} is not {want}")
            for beam, (_, score) in zip(found, want, strict=True):
                require(math.isclose(beam.cum_logprob, score), "answers")


ACTIONS = {
    "step": 60,
    "search": 14,
    "add": 10,
    "abort": 2,
    "abort_search": 2,
    "fail": 2,
    "reset": 1,
}


class TieredBeamHistory(BeamHistory, HostCacheHistory):
    pass


def run_history(seed: int, schedulers=scheduler, make=BeamHistory) -> BeamHistory:
    history = make(seed, schedulers)
    try:
        for name in history.rng.choices(list(ACTIONS), list(ACTIONS.values()), k=50):
            if name == "fail":
                history.abandon()
            else:
                getattr(history, name)()
            history.check()
        history.drain()
    except Exception as error:
        raise AssertionError(f"run_history({seed}) fails: {error!r}") from error
    return history
