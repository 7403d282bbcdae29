"""The prefix cache on disk, so that a later process does not compute the same prefix again.

A block hash depends on tokens only and not on the process, so a block that is read from a file is
found as if this process had computed it. The file is in the format of safetensors:

    kv         [n, layers, 2, K, B, D] in the dtype of the KV cache
    token_ids  [n, B] int32
    parents    [n] int32, the index of the block before it, or -1
    metadata   what the KV depends on (`fingerprint`), and checksums of all this

The most recently used blocks are first, but each block is after its parent. The first blocks are
therefore whole prefixes, and a cache that is too small for all blocks loads only these.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.threads import hold_interrupt
from nanovllm.utils.log import logger

NAME = "prefix-cache.safetensors"
TENSORS = "kv", "token_ids", "parents"


def save(engine: LLMEngine, config: EngineConfig, path: str | os.PathLike[str]) -> int:
    """See `LLM.save_prefix_cache`."""
    metadata, file = fingerprint(engine, config), Path(path).expanduser() / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    # safetensors may write to a file with a random name. A process that is killed leaves it here,
    # where the next call removes it.
    temporary = file.with_suffix(".tmp")
    runner: Any = engine.runner
    with FileLock(file.with_suffix(".lock")), engine.idle(), runner.thread_limit():
        blocks = blocks_to_save(engine.scheduler.block_manager)
        if not blocks:
            return 0
        cache = runner.attention.cache
        rows = {block.block_hash: row for row, block in enumerate(blocks)}
        parents = [rows.get(block.parent_block_hash, -1) for block in blocks]
        tensors = {
            "kv": torch.stack([cache[:, :, block.block_id].cpu() for block in blocks]),
            "token_ids": torch.tensor([block.token_ids for block in blocks], dtype=torch.int32),
            "parents": torch.tensor(parents, dtype=torch.int32),
        }
        metadata["kv checksum"] = checksum_of_kv(tensors["kv"])
        metadata["checksum"] = checksum(metadata, tensors)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            save_file(tensors, temporary / NAME, metadata)
            # A process that loads the old file meanwhile keeps it open.
            (temporary / NAME).replace(file)
        except Exception as error:  # the error types of safetensors are not public
            raise OSError(f"{file} cannot be written: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    num_tokens = len(blocks) * config.block_size
    logger.info(f"saved the KV of {num_tokens:,} tokens to {file}")
    return num_tokens


def blocks_to_save(block_manager: BlockManager) -> list[Block]:
    """Return the cached blocks, the most recently used first, but each after its parent.

    A block whose parent is not cached is left out, because no prompt matches it.
    """
    cached, ordered = block_manager.hash_to_block, dict[bytes, Block]()
    for block_id in reversed(block_manager.evictable):
        prefix, block_hash = [], block_manager.blocks[block_id].block_hash
        while block_hash in cached and block_hash not in ordered:
            prefix.append(cached[block_hash])
            block_hash = prefix[-1].parent_block_hash
        if not block_hash or block_hash in ordered:
            ordered |= {block.block_hash: block for block in reversed(prefix)}
    return list(ordered.values())


def checksum_of_kv(kv: Tensor) -> str:
    return xxh3_128(kv.view(torch.uint8).numpy().data).hexdigest()


def checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """Return a checksum of everything but the KV, whose checksum is in `metadata`."""
    digest = xxh3_128(json.dumps(sorted(metadata.items())).encode())
    digest.update(f"{tensors['kv'].dtype} {tensors['kv'].shape}".encode())
    for name in ("token_ids", "parents"):
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()


def load(engine: LLMEngine, config: EngineConfig, path: str | os.PathLike[str]) -> int:
    """See `LLM.load_prefix_cache`."""
    expected, file = fingerprint(engine, config), Path(path).expanduser() / NAME
    if not file.exists():
        return 0
    try:
        with safe_open(file, framework="pt") as source:  # the file is memory-mapped
            found: dict[str, str] = source.metadata()
            tensors = {name: source.get_tensor(name) for name in TENSORS}
        if found.pop("checksum") != checksum(found, tensors):
            raise ValueError("its content has another checksum")
    except Exception as error:  # the error types of safetensors are not public
        raise damaged(file, error) from None
    kv_checksum = found.pop("kv checksum")
    different = [
        f"{name} is {found.get(name)!s:.99} in the file and {expected.get(name)!s:.99} here"
        for name in {**expected, **found}
        if name != "model" and found.get(name) != expected.get(name)
    ]
    if different:
        raise ValueError(
            f"{file} is of the model {found['model']} and cannot be used with {expected['model']}: "
            f"{'; '.join(different[:3])}; use another directory"
        )
    with engine.idle():
        kv, token_ids, parents = (tensors[name] for name in TENSORS)
        loaded = load_kv(engine, kv, token_ids, parents, kv_checksum)
        if loaded is None:
            raise damaged(file, "its KV has another checksum")
        blocks = engine.scheduler.block_manager
        with hold_interrupt():
            for block, block_hash, tokens, parent_hash in loaded:
                blocks.free.pop()
                blocks.cache(block, block_hash, tokens, parent_hash)
                # What this process has used is evicted last, and before that the first rows.
                blocks.evictable[block.block_id] = None
                blocks.evictable.move_to_end(block.block_id, last=False)
    num_tokens, num_saved = len(loaded) * config.block_size, token_ids.numel()
    logger.info(f"loaded the KV of {num_tokens:,} of {num_saved:,} tokens in {file}")
    return num_tokens


def damaged(file: Path, why: object) -> ValueError:
    return ValueError(f"{file} is damaged, and nothing was loaded ({why!s:.200}); remove it")


def load_kv(
    engine: LLMEngine, kv: Tensor, token_ids: Tensor, parents: Tensor, kv_checksum: str
) -> list[tuple[Block, bytes, list[int], bytes]] | None:
    """Copy the KV of blocks that are not cached to free blocks, while its checksum is computed.

    Returns the arguments of `BlockManager.cache` for each, or None if the checksum is wrong. The
    blocks are still free, so their content has no meaning yet.
    """
    blocks: BlockManager = engine.scheduler.block_manager
    cache: Any = engine.runner.attention.cache  # type: ignore[attr-defined]
    source: Any = kv.view(torch.uint8)
    target, content = cache.view(torch.uint8), source.numpy()
    if cache.device.type == "cpu":  # NumPy copies faster, with one thread
        source, target = content, target.numpy()
    hashes, digest = list[bytes](), xxh3_128()
    loaded: list[tuple[Block, bytes, list[int], bytes]] = []
    for row, (tokens, parent) in enumerate(zip(token_ids.tolist(), parents.tolist(), strict=True)):
        parent_hash = hashes[parent] if parent >= 0 else b""
        hashes.append(blocks.hash_block(parent_hash, tokens))
        digest.update(content[row].data)
        if len(loaded) < len(blocks.free) and hashes[row] not in blocks.hash_to_block:
            block = blocks.blocks[blocks.free[-1 - len(loaded)]]
            target[:, :, block.block_id] = source[row]
            loaded.append((block, hashes[row], tokens, parent_hash))
    return loaded if digest.hexdigest() == kv_checksum else None


def fingerprint(engine: LLMEngine, config: EngineConfig) -> dict[str, str]:
    """Return what the KV of given tokens depends on, by name.

    The kernels of a device are not part of it, because their KV differs by rounding only. Raises
    ValueError if the prefix cache cannot be saved or loaded.
    """
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
    config_json = engine.checkpoint.config.items()
    return {
        "format": "1",
        "model": os.fspath(config.model),
        "dtype": str(runner.dtype),
        "dtype of the KV cache": str(runner.attention.cache.dtype),
        "fp8 scales": str(runner.attention.scales),
        "block_size": str(config.block_size),
        "device": runner.device.type,
        "quantization": quantization,
        "weights": weights,
        **{f"{name} in config.json": json.dumps(value) for name, value in config_json},
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
