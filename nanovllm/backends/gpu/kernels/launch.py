"""Launches of Triton kernels with little work on the host.

For every launch Triton derives from all arguments the compiled variant of the kernel, and then
calls its launcher with hooks and metadata for profilers. This takes longer than the launch itself:
with 28 layers, half of the host's time of a step with chunks. `launch` does it once for each
combination of types, constants and options, and later calls the launcher with addresses alone. No
argument that varies between launches changes the variant: integers are in `do_not_specialize`,
batches' integers in `do_not_specialize_on_alignment`, and other tensors are aligned to 16 bytes or
take the long way.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton.runtime import KernelInterface, driver

# Products may be rounded once, with the addition that follows. Triton 3.9 warns if this is not set,
# because 3.10 changes the default.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
INTEGERS = (torch.int32, torch.int64)


# Launcher, handle, metadata, function that returns the current stream, indices of the tensors that
# are aligned, and the kernel: it is kept, so that no other one gets its id.
Compiled: TypeAlias = tuple[
    Callable[..., None], Any, Any, Callable[[int], int], list[int], KernelInterface[Any]
]
# Triton keeps its compiled kernels for the whole process too.
_compiled: dict[tuple[Any, ...], Compiled] = {}


def launch(
    kernel: KernelInterface[Any],
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, int],
    **options: int,
) -> None:
    """Launch `kernel` on `grid`: num_warps and num_stages are options.

    `args` are tensors, then numbers that have the same types in each launch. `constants` are the
    kernel's constexpr parameters in their order, and follow `args`.
    """
    values, device = constants.values(), args[0].get_device()
    tensors = [x for x in args if isinstance(x, Tensor)]
    key = (id(kernel), device, *values, *options.values(), *[x.dtype for x in tensors])
    if (found := _compiled.get(key)) is not None:
        run, function, metadata, current_stream, aligned, _ = found
        addresses = [x.data_ptr() for x in tensors]
        for i in aligned:
            if addresses[i] % 16:
                break
        else:
            numbers, hooks = args[len(tensors) :], (None, None, None)
            stream = current_stream(device)
            run(*grid, stream, function, metadata, *hooks, *addresses, *numbers, *values)
            return
    compiled = kernel[grid](*args, *values, **options, **COMPILE_OPTIONS)
    aligned = [i for i, x in enumerate(tensors) if x.dtype not in INTEGERS]
    # In Triton's interpreter `compiled` is None.
    if compiled is not None and not any(tensors[i].data_ptr() % 16 for i in aligned):
        handles = compiled.run, compiled.function, compiled.packed_metadata
        _compiled[key] = *handles, driver.active.get_current_stream, aligned, kernel
