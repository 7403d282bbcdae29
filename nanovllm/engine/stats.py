"""The counters of `LLM.stats`, which docs/api.md explains."""

from nanovllm.engine.progress import Progress
from nanovllm.engine.scheduler import Scheduler


def stats(scheduler: Scheduler, progress: Progress) -> dict[str, int | float]:
    """Return the counters of an engine, whose requests have the counters `progress`."""
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
        "prompt_tokens": progress.num_prompt_tokens,
        "output_tokens": progress.num_output_tokens,
        **blocks.stats(),
        **drafts,
    }
