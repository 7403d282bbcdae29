"""The prefix cache on disk, so that a later process does not compute the same prefix again.

A block hash depends on tokens only, so blocks of a file are found as if computed here. The file has
the KV of n blocks [n, layers, 2, K, B, D], the most recently used first, so that the first ones are
whole prefixes. Its metadata are tokens and parent hashes, the `fingerprint`, and a checksum.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from xxhash import xxh3_128

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.threads import hold_interrupt
from nanovllm.features.kv.host_cache.host_blocks import HostBlock, HostCacheBlockManager
from nanovllm.utils.log import logger

NAME = "prefix-cache.safetensors"


def save(engine: Any, config: Any, path: Any) -> int:
    """See `LLM.save_prefix_cache`."""
    file = file_in(path)
    with engine.idle():
        engine.check_blocked()
        metadata = fingerprint(engine, config)
        if not (blocks := cached_blocks(engine.scheduler.block_manager)):
            return 0
        kv = torch.stack([kv_of(engine.runner, block).cpu() for block in blocks])
    metadata["blocks"] = json.dumps([(b.parent_block_hash.hex(), b.token_ids) for b in blocks])
    metadata["checksum"] = checksum(metadata, kv)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{NAME}-", dir=file.parent) as temporary:
            save_file({"kv": kv}, Path(temporary) / NAME, metadata)
            (Path(temporary) / NAME).replace(file)  # who reads the old file keeps it open
    except Exception as error:  # the error types of safetensors are not public
        raise OSError(f"{file} cannot be written: {error}") from error
    num = len(blocks) * config.block_size
    logger.info(f"saved the KV of {num:,} tokens to {file}")
    return num


def load(engine: Any, config: Any, path: Any) -> int:
    """See `LLM.load_prefix_cache`."""
    file = file_in(path)
    num = 0
    with engine.idle():  # also while the file is read: load_weights changes the fingerprint
        engine.check_blocked()
        here = fingerprint(engine, config)
        if not file.exists():
            return 0
        try:
            with safe_open(file, framework="pt") as source:  # the file is memory-mapped
                found, kv = source.metadata(), source.get_tensor("kv")
            if found.pop("checksum") != checksum(found, kv):
                raise ValueError("its content has another checksum")
        except Exception as error:  # the error types of safetensors are not public
            raise ValueError(f"{file} is damaged, remove it; nothing is loaded: {error}") from None
        saved = json.loads(found.pop("blocks"))
        names = [name for name in {**here, **found} if here.get(name) != found.get(name)]
        if names not in ([], ["model"]):  # a copy of the model has another path
            differences = ", ".join(
                f"{name} ({found.get(name)!s:.99}; here {here.get(name)!s:.99})"
                for name in names[:8]
            )
            raise ValueError(
                f"{file} does not fit this engine: they differ in {differences}; use another "
                "directory"
            )
        with hold_interrupt(), torch.inference_mode():
            for block, i in restore(engine.scheduler.block_manager, saved):
                kv_of(engine.runner, block).copy_(kv[i])
                num += config.block_size
    logger.info(f"loaded the KV of {num:,} tokens from {file}")
    return num


def file_in(path: Any) -> Path:
    """Return the file in the directory `path`. Raises ValueError if that cannot be a directory."""
    directory = os.path.expanduser(path) if isinstance(path, str | os.PathLike) else ""
    if directory[:1] in ("", "~") or os.path.isfile(directory):  # "~" of an unknown user
        raise ValueError(f"path must be a directory, not {path!r:.200}")
    return Path(directory, NAME)


def cached_blocks(blocks: BlockManager) -> list[Block]:
    """Return the cached blocks, the most recently used first, and then those in host memory."""
    cached = [blocks.blocks[block_id] for block_id in reversed(blocks.evictable)]
    on_host: dict[bytes, HostBlock] = getattr(blocks, "hash_to_host_block", {})
    return cached + [on_host[h] for h in reversed(on_host) if h not in blocks.hash_to_block]


def restore(blocks: BlockManager, saved: list[Any]) -> Iterator[tuple[Block, int]]:
    """Yield (block, i): a free block, to which the caller copies saved block i. Then cache it."""
    for i, (parent, token_ids) in enumerate(saved):
        parent_hash = bytes.fromhex(parent)
        block_hash = blocks.hash_block(parent_hash, token_ids)
        if blocks.find(block_hash) is not None:
            continue
        # What this process has used is evicted last, and before that the first blocks.
        if blocks.free:
            yield (block := blocks.blocks[blocks.free[-1]]), i
            blocks.cache(block, block_hash, token_ids, parent_hash)
            blocks.evictable[blocks.free.pop()] = None
            blocks.evictable.move_to_end(block.block_id, last=False)
        elif isinstance(blocks, HostCacheBlockManager) and blocks.host_free:
            block = HostBlock(blocks.host_free[-1], 0, block_hash, token_ids, parent_hash)
            yield block, i
            blocks.hash_to_host_block[block_hash] = block
            blocks.hash_to_host_block.move_to_end(block_hash, last=False)
            blocks.host_free.pop()


def kv_of(runner: Any, block: Block) -> Any:
    """Return the memory of a block: [layers, 2, K, B, D]."""
    if isinstance(block, HostBlock):
        return runner.host_pool.block(block.block_id)
    return runner.attention.cache[:, :, block.block_id]


def checksum(metadata: dict[str, str], kv: Any) -> str:
    digest = xxh3_128(json.dumps([sorted(metadata.items()), str(kv.dtype), kv.shape]).encode())
    digest.update(kv.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(engine: Any, config: Any) -> dict[str, str]:
    """Return what the KV depends on besides tokens, by name. Kernels are not part of it."""
    runner = engine.runner
    checkpoint = engine.checkpoint
    ranks = config.tensor_parallel_size
    for reason, applies in {
        "enable_prefix_caching is False": not config.enable_prefix_caching,
        f"each of tensor_parallel_size={ranks} ranks has a part of it": ranks > 1,
        "the model has states of linear attention besides KV": runner.states,
        "the weights are not a checkpoint's; call load_weights(DIRECTORY)": checkpoint.is_replaced,
    }.items():
        if applies:
            raise ValueError(f"the prefix cache cannot be saved or loaded, because {reason}")
    adapter = checkpoint.adapter
    digest = xxh3_128()
    for path, stat in checkpoint.opened.items():
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, xxh3_128).digest())
        if path.stat().st_mtime_ns != stat.st_mtime_ns:
            raise ValueError(f"{path} has changed since it was loaded; make a new LLM")
    values = {
        "model": checkpoint.directory,
        "weights": digest.hexdigest() if checkpoint.opened else f"random with seed {config.seed}",
        "dtype": runner.dtype,
        "block_size": config.block_size,
        "kv_cache_dtype": runner.attention.cache.dtype,
        "layout of the KV cache": runner.attention.layout,
        "kv_scales": runner.attention.scales,  # load_weights does not change them
        "quantization": config.quantization,
        "adapter": adapter and (adapter.ranks, adapter.alphas, adapter.use_rslora),
    }
    fields = {f"{x} of config.json": v for x, v in checkpoint.config.items() if v is not None}
    return {name: str(value) for name, value in (values | fields).items()}
