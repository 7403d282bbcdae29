"""Shows the result of a benchmark, a dict, as a table."""

import textwrap
from statistics import median
from typing import Any

from tools.benchmarks.machine import describe_load


def entry(name: str, text: str) -> str:
    """Return one figure in lines of at most 100 columns."""
    return textwrap.fill(f"{name:22} {text}", 100, subsequent_indent=" " * 23)


def span(values: list[float], digits: str) -> str:
    """Return the range of the values; empty if there is only one."""
    return "" if len(values) == 1 else f"{min(values):{digits}} - {max(values):{digits}}"


def table(result: dict[str, Any]) -> str:
    """Return one line for each engine, then the figures of nanovllm."""
    engines = result["engines"]
    kind = result["rate_of"]
    rates_by_engine = [[r[f"{kind}_tokens_per_second"] for r in e["runs"]] for e in engines]
    ours = rates_by_engine[0]
    title = f"{'output' if kind == 'output' else 'prompt'} tokens/s"
    lines = [
        f"{'':13}{title:^32}{'in + out':>9}{'speed-up':^26}{'other processes':>19}",
        f"{'median':>23}{'range':^22}{'tokens/s':>9}{'of nanovllm':^26}{'took CPU time':>19}",
    ]
    pairs = []
    for engine, rates in zip(engines, rates_by_engine, strict=True):
        tokens = engine["input_tokens"] + engine["output_tokens"]
        total = median(rates) * tokens / engine[f"{kind}_tokens"]
        factors = [a / b for a, b in zip(ours, rates, strict=True)]
        factor = f"{median(factors):9.2f}x {span(factors, '.2f'):^15}" if rates != ours else ""
        if engine["engine"] != "nanovllm":
            ratios = f"{', '.join(f'{f:.2f}' for f in factors)} times as fast"
            if len(factors) > 1:
                ratios += f" in the pairs of turns; median {median(factors):.2f}"
                ratios += f" ({min(factors):.2f} to {max(factors):.2f})"
            pairs.append(entry(f"against {engine['name']}", ratios))
        loads = [run["other_load"] for run in engine["runs"]]
        load = describe_load(max(loads))
        figures = f"{median(rates):10,.1f}{span(rates, ',.1f'):^22}{total:9,.0f}"
        lines.append(f"{engine['name']:13}{figures}{factor:26}{load:>19}")
    lines += [entry(engine["name"], engine["note"]) for engine in engines if engine["note"]]
    lines += pairs
    lines += [entry(name, f"failed: {error}") for name, error in result["failed"].items()] + [""]

    run, peak, cost, parts = (result[n] for n in ("run", "peak", "cost", "seconds_by_component"))
    for name in ("waiting_time", "time_to_first_token", "time_per_output_token"):
        p50, p99 = (run[f"{name}_ms"][q] for q in ("p50", "p99"))
        lines.append(entry(name.replace("_", " "), f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms"))
    largest = sorted(parts.items(), key=lambda part: -part[1])[:7]
    shares = [f"{name} {seconds / sum(parts.values()):.0%}" for name, seconds in largest]
    phases = [f"{s:,.2f} s {name} ({bound})" for name, (s, bound) in result["roofline"].items()]
    memory = engines[0]["runs"][0]["peak_memory_bytes"] / 2**20
    share = result["roofline_share"]
    weights = cost["decode_weight_bytes"] / max(1, cost["decode_steps"])
    entries = {
        "steps": f"{len(run['steps']):,} with {run['mean_batch']:.1f} sequences on average; "
        f"preemptions {run['preemptions']}; {run['prefix_hit_rate']:.1%} of the prompt were cached",
        "start, peak memory": f"{result['load_seconds']:.1f} s, {memory:,.0f} MiB",
        "where the time went": f"{', '.join(shares)} (from a shorter run with a profiler)",
        "this machine": f"reads {peak['bandwidth'] / 1e9:,.1f} GB/s from a buffer of "
        f"{peak['buffer_bytes'] / 2**20:,.0f} MiB, multiplies {peak['flops'] / 1e12:,.2f} TFLOP/s",
        "this workload": f"prefill {cost['prefill_flops'] / 1e12:,.3f} TFLOP for "
        f"{cost['prefill_tokens']:,} tokens; decode {cost['decode_flops'] / 1e12:,.3f} TFLOP and "
        f"{cost['decode_steps']:,} x {weights / 1e6:,.1f} MB of weights + "
        f"{cost['kv_bytes'] / 1e9:,.2f} GB of KV",
        "roofline": f"{' + '.join(phases)}; took {run['seconds']:,.2f} s: {share:.1%} of it",
    }
    return "\n".join([*lines, *map(entry, entries, entries.values())])
