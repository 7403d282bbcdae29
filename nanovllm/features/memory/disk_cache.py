"""The prefix cache on disk, so that a later process does not compute the same prefix again.

A block hash depends on tokens only and not on the process, so a block that is read from a file is
found as if this process had computed it. The file is in the format of safetensors:

    kv        [n, layers, 2, K, B, D] of n blocks in the dtype of the KV cache
    metadata  blocks: of each, the hash of the block before it in hexadecimal digits, and its tokens
              what the KV depends on, see `fingerprint`, and a checksum of all this

The most recently used blocks are first. A block is not less recently used than its children, so the
first blocks are whole prefixes, and a cache that is too small for all blocks loads these.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.threads import hold_interrupt
from nanovllm.features.memory.host_cache.blocks import HostBlock, HostCacheBlockManager
from nanovllm.utils.log import logger

if TYPE_CHECKING:
    from torch import Tensor

NAME = "prefix-cache.safetensors"


def save(engine: LLMEngine, config: EngineConfig, path: str | os.PathLike[str]) -> int:
    """See `LLM.save_prefix_cache`."""
    import torch
    from safetensors.torch import save_file

    file = file_in(path)
    with engine.idle():
        metadata = fingerprint(engine, config)
        if not (blocks := cached_blocks(engine.scheduler.block_manager)):
            return 0
        saved = [(block.parent_block_hash.hex(), block.token_ids) for block in blocks]
        metadata["blocks"] = json.dumps(saved)
        kv = torch.stack([kv_of(engine.runner, block).cpu() for block in blocks])
    metadata["checksum"] = checksum(metadata, kv)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A process that loads the old file meanwhile keeps it open.
        with TemporaryDirectory(prefix=f"{NAME}-", dir=file.parent) as temporary:
            save_file({"kv": kv}, Path(temporary) / NAME, metadata)
            (Path(temporary) / NAME).replace(file)
    except Exception as error:  # the error types of safetensors are not public
        raise OSError(f"{file} cannot be written: {error}") from error
    num_tokens = len(blocks) * config.block_size
    logger.info(f"saved the KV of {num_tokens:,} tokens to {file}")
    return num_tokens


def load(engine: LLMEngine, config: EngineConfig, path: str | os.PathLike[str]) -> int:
    """See `LLM.load_prefix_cache`."""
    from safetensors import safe_open

    file = file_in(path)
    with engine.idle():  # also while the file is read: load_weights changes the fingerprint
        expected = fingerprint(engine, config)
        if not file.exists():
            return 0
        try:
            with safe_open(file, framework="pt") as source:  # the file is memory-mapped
                found: dict[str, str] = source.metadata()
                kv: Tensor = source.get_tensor("kv")
            if found.pop("checksum") != checksum(found, kv):
                raise ValueError("its content has another checksum")
        except Exception as error:  # the error types of safetensors are not public
            raise ValueError(
                f"{file} is damaged or cannot be read, and nothing was loaded ({error!s:.200}); "
                "remove it, or use another directory"
            ) from None
        saved = json.loads(found.pop("blocks"))
        different = [
            f"{name} is {found.get(name)!s:.99} in the file and {expected.get(name)!s:.99} here"
            for name in {**expected, **found}
            if name != "model" and found.get(name) != expected.get(name)
        ]
        if different:
            raise ValueError(
                f"{file} is of the model {found['model']} and cannot be used with "
                f"{expected['model']}: {'; '.join(different[:3])}; use another directory"
            )
        num_loaded = restore(
            engine.scheduler.block_manager, saved, partial(write_kv, engine.runner, kv)
        )
    num_tokens, num_saved = (n * config.block_size for n in (num_loaded, len(saved)))
    logger.info(f"loaded the KV of {num_tokens:,} of {num_saved:,} tokens in {file}")
    return num_tokens


def file_in(path: str | os.PathLike[str]) -> Path:
    """Return the path of the file in a directory. Raises NotADirectoryError for another file."""
    directory = Path(path).expanduser()
    if not os.fspath(path) or (directory.exists() and not directory.is_dir()):
        raise NotADirectoryError(
            f"the prefix cache is a file in a directory, and {os.fspath(path)!r} is no directory; "
            "give a directory, which save_prefix_cache makes"
        )
    return directory / NAME


def cached_blocks(blocks: BlockManager) -> list[Block]:
    """Return the cached blocks, the most recently used first, and then those in host memory."""
    cached = [blocks.blocks[block_id] for block_id in reversed(blocks.evictable)]
    if isinstance(blocks, HostCacheBlockManager):
        on_host = reversed(blocks.hash_to_host_block.values())
        cached += [b for b in on_host if b.block_hash not in blocks.hash_to_block]
    return cached


def restore(
    blocks: BlockManager,
    saved: list[tuple[str, list[int]]],
    write: Callable[[list[tuple[Block, int]]], None],
) -> int:
    """Cache saved blocks in free blocks, then in free host blocks. Returns their number.

    `write` gets pairs (block, i), and copies the KV of the i-th saved block to the block. It is
    still free then, so that an error or Ctrl-C changes nothing.
    """
    host = blocks if isinstance(blocks, HostCacheBlockManager) else None
    free = [blocks.blocks[block_id] for block_id in reversed(blocks.free)]
    free += [HostBlock(block_id) for block_id in reversed(host.host_free)] if host else []
    pairs = [(bytes.fromhex(parent), token_ids) for parent, token_ids in saved]
    hashes = [blocks.hash_block(parent_hash, token_ids) for parent_hash, token_ids in pairs]
    missing = [i for i, block_hash in enumerate(hashes) if blocks.find(block_hash) is None]
    places = list(zip(free, missing, strict=False))  # as many as fit
    write(places)
    with hold_interrupt():
        # What this process has used is evicted last, and before that the first blocks.
        for block, i in places:
            parent_hash, token_ids = pairs[i]
            if host is not None and isinstance(block, HostBlock):
                host.host_free.pop()
                host_block = HostBlock(block.block_id, 0, hashes[i], token_ids, parent_hash)
                host.hash_to_host_block[hashes[i]] = host_block
                host.hash_to_host_block.move_to_end(hashes[i], last=False)
            else:
                blocks.free.pop()
                blocks.cache(block, hashes[i], token_ids, parent_hash)
                blocks.evictable[block.block_id] = None
                blocks.evictable.move_to_end(block.block_id, last=False)
    return len(places)


def write_kv(runner: Any, kv: Tensor, places: list[tuple[Block, int]]) -> None:
    """Copy rows of `kv` [n, layers, 2, K, B, D] to blocks, those in host memory last.

    64 blocks are copied at once, because starting the threads of a copy can take 1 ms. More would
    take more memory on a GPU.
    """
    import torch

    cache: Tensor = runner.attention.cache.view(torch.int16)  # fp8 has no index_copy_
    on_device = [(b.block_id, row) for b, row in places if not isinstance(b, HostBlock)]
    for start in range(0, len(on_device), 64):
        block_ids, rows = zip(*on_device[start : start + 64], strict=True)
        are_consecutive = rows[-1] - rows[0] < len(rows)
        part = kv[rows[0] : rows[-1] + 1] if are_consecutive else kv[list(rows)]
        part = part.to(cache.device).view(torch.int16).movedim(0, 2)
        cache.index_copy_(2, torch.tensor(block_ids, device=cache.device), part)
    for block, row in places[len(on_device) :]:
        kv_of(runner, block).copy_(kv[row])


def kv_of(runner: Any, block: Block) -> Tensor:
    """Return the memory of a block: [layers, 2, K, B, D]."""
    cache, pool, i = runner.attention.cache, runner.host_pool, block.block_id
    kv: Tensor = pool.block(i) if isinstance(block, HostBlock) else cache[:, :, i]
    return kv


def checksum(metadata: dict[str, str], kv: Tensor) -> str:
    import torch

    digest = xxh3_128(json.dumps([sorted(metadata.items()), str(kv.dtype), kv.shape]).encode())
    digest.update(kv.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(engine: LLMEngine, config: EngineConfig) -> dict[str, str]:
    """Return what the KV of given tokens depends on, by name: of the weights that are loaded now.

    Devices and their kernels are not part of it, because their KV differs by rounding only. Raises
    ValueError if the prefix cache cannot be saved or loaded.
    """
    import torch

    runner: Any = engine.runner
    reason = ""
    if not config.enable_prefix_caching:
        reason = "enable_prefix_caching is False"
    elif config.tensor_parallel_size > 1:
        reason = (
            f"each of tensor_parallel_size={config.tensor_parallel_size} ranks has a part of it"
        )
    elif runner.states is not None:
        reason = f"{runner.model.config.architecture} has states of linear attention besides KV"
    elif engine.checkpoint.is_replaced:
        reason = "load_weights has stored weights that are not the files of a checkpoint"
    if reason:
        raise ValueError(f"the prefix cache cannot be saved or loaded, because {reason}")
    weights = f"random with seed {config.seed} and torch {torch.__version__}"
    if engine.checkpoint.opened:
        weights = digest_of_files(engine.checkpoint.opened)
    # Other values are formats of checkpoints, which config.json names.
    quantization = config.quantization if config.quantization in ("int8", "int4") else "none"
    config_json, adapter = engine.checkpoint.config.items(), engine.checkpoint.adapter
    return {
        "format": "2",
        "model": os.fspath(config.model),
        "weights": weights,
        "adapter": str(adapter and (adapter.ranks, adapter.alphas, adapter.use_rslora)),
        "quantization": quantization,
        "dtype": str(runner.dtype),
        "dtype of the KV cache": str(runner.attention.cache.dtype),
        "block_size": str(config.block_size),
        **{f"{name} in config.json": json.dumps(value) for name, value in config_json},
        "fp8 scales": str(runner.attention.scales),
    }


def digest_of_files(opened: dict[Path, os.stat_result]) -> str:
    """Return a digest of files. Raises ValueError if one has changed since it was opened."""
    digest = xxh3_128()
    for path, then in opened.items():
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, xxh3_128).digest())
        now = path.stat()
        if any(getattr(now, x) != getattr(then, x) for x in ("st_ino", "st_size", "st_mtime_ns")):
            raise ValueError(f"{path} has changed since it was loaded; make a new LLM")
    return digest.hexdigest()
