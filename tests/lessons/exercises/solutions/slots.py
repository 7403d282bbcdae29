"""A solution of `python -m lessons build slots`."""


def slots(block_table: list[int], block_size: int, start: int, count: int) -> list[int]:
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, start + count)
    ]


def blocks_to_append(block_table: list[int], block_size: int, start: int, count: int) -> int:
    needed = -(-(start + count) // block_size)
    return max(0, needed - len(block_table))
