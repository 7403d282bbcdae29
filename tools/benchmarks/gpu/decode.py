"""Times attention of a decode by tile, number of rows and lengths of the contexts."""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from nanovllm.backends.gpu.kernels.configs import GpuInfo, Tile
from nanovllm.models.fp8 import FP8
from tools.benchmarks import kernels, roofline
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.gpu.timing import COLD_BYTES, DEVICE, seconds

ROWS = (1, 8, 32, 64, 128, 256)
# Lengths of the contexts, drawn uniformly.
CONTEXTS = ((100, 2000), (1024, 1024), (8192, 8192))
TABLE = "the table's tile"
# (keys, warps, stages) of tiles that the table may take.
CANDIDATES = ((64, 2, 3), (32, 2, 3), (32, 1, 3), (16, 1, 4), (128, 4, 3), (64, 4, 4))


def tiles(case: kernels.Decode) -> Iterator[tuple[str, Tile]]:
    """Yield the tile of the table, and the candidates with as many programs as memory allows."""
    table, memory = case.table_tile(), GpuInfo.of(DEVICE).shared_memory_kib * 1024
    yield TABLE, table
    for keys, warps, stages in CANDIDATES:
        size = 2 * case.kv.dtype.itemsize * keys * kernels.D * stages
        programs = max(1, min(8, memory // (size + 2048)))
        tile = replace(table, num_keys=keys, num_warps=warps, num_stages=stages)
        tile = replace(tile, programs_per_sm=programs)
        if tile != table:
            yield f"{keys} keys, {warps} warps, {stages} stages, {programs} programs", tile


def rows() -> Iterator[Row]:
    """Yield a row for each case and tile, and shares of the table's tile and of the best other."""
    rng = random.Random(0)
    bandwidth = roofline.measure_peak(DEVICE, torch.bfloat16, COLD_BYTES)["bandwidth"]
    for low, high in CONTEXTS:
        for dtype in kernels.cache_dtypes():
            lengths = f"{low} to {high}" if low < high else f"{low}"
            name = f"{'fp8' if dtype == FP8 else 'bf16'}, contexts of {lengths}"
            shares: dict[str, Row] = {}
            for num in ROWS:
                case = kernels.Decode.random([rng.randint(low, high) for _ in range(num)], dtype)
                for by, tile in tiles(case):
                    time = seconds(case.calls(tile))
                    share = case.num_bytes / time / bandwidth
                    shares.setdefault(by, {})[f"{num} rows"] = share
                    row = {"decode": name, "by": by, "rows": num, "us": 1e6 * time}
                    yield row | {"GB/s": case.num_bytes / time / 1e9, "share": share}
            best = max(shares.keys() - {TABLE}, key=lambda by: sum(shares[by].values()))
            for by in (TABLE, best):
                yield headline({"decode": name, "by": f"{by}: share of the bandwidth"} | shares[by])
