"""Progress: the counters of a call or of an engine, and the progress bar of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine.request import Request
    from nanovllm.engine.scheduler import Scheduler


@dataclass(slots=True)
class Progress:
    """Counters of the requests of one call or of an engine, updated when a request changes."""

    num_ended: int = 0
    num_prompt_tokens: int = 0  # of requests that have their first token
    num_ended_tokens: int = 0  # output tokens of requests that have ended
    started: set[Request] = field(default_factory=set)  # have a token, and have not ended
    changed: set[Request] = field(default_factory=set)  # streams with results to read
    error: Exception | None = None  # the first error that ended a request

    @property
    def num_output_tokens(self) -> int:
        # A copy, because another thread may run a step meanwhile.
        return self.num_ended_tokens + sum(r.num_output for r in list(self.started))

    def start(self, request: Request) -> None:
        self.num_prompt_tokens += request.samples[0].seq.num_prompt
        self.started.add(request)

    def end(self, request: Request) -> None:
        self.num_ended += 1
        self.num_ended_tokens += request.num_output
        self.started.discard(request)

    def stats(self, scheduler: Scheduler) -> dict[str, int | float]:
        """Return the counters of `LLM.stats`, which docs/api.md explains, of a whole engine."""
        blocks = scheduler.block_manager
        drafts = {} if scheduler.speculation is None else scheduler.speculation.stats()
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_unfinished - len(scheduler.running),
            "blocks_in_use": blocks.num_blocks - blocks.num_available,
            "blocks_evictable": len(blocks.evictable),
            "blocks_free": len(blocks.free),
            "prefix_hit_rate": scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
            "preemptions": scheduler.preemptions,
            "evictions": blocks.evictions,
            "recomputed_tokens": scheduler.recomputed_tokens,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            **blocks.stats(),
            **drafts,
        }

    def show(self, bar: Any, scheduler: Scheduler, seconds: float) -> None:
        """Show the counters of a call, which has run for `seconds`, in its progress bar."""
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens
        # A long prompt takes many steps until its request has a first token. The list is a copy,
        # because another thread may run a step meanwhile.
        for seq in list(scheduler.running):
            request = seq.request
            if request and request.progress is self and request not in self.started:
                num_prompt += min(seq.num_computed, seq.num_prompt)
        prompt, output = (n / (seconds + 1e-9) for n in (num_prompt, num_output))
        rates = f"prompt {prompt:,.0f} tok/s, output {output:,.0f} tok/s"
        bar.set_postfix_str(rates, refresh=False)
        bar.update(self.num_ended - bar.n)
        bar.refresh()
