"""Launches of Triton kernels with little work on the host.

For every launch Triton derives from all arguments the compiled variant of the kernel. This takes
about 10 us: with 28 layers, half of the host's time of a step with chunks. `launch` does it once
for each combination of types, constants and options. No argument that varies between launches
changes the variant: integers are in `do_not_specialize`, batches' integers in
`do_not_specialize_on_alignment`, and other tensors are aligned to 16 bytes or take the long way.
"""

from typing import Any

import torch
from torch import Tensor
from triton.runtime import KernelInterface

# Products may be rounded once, with the addition that follows. Triton 3.9 warns if this is not set,
# because 3.10 changes the default.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
INTEGERS = (torch.int32, torch.int64)
# Triton keeps its compiled kernels for the whole process too.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: KernelInterface[Any],
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, int],
    **options: int,
) -> None:
    """Launch `kernel` on `grid`: num_warps and num_stages are options.

    `constants` are the kernel's constexpr parameters in their order. They follow `args`.
    """
    values = tuple(constants.values())
    key: list[Any] = [id(kernel), args[0].device, *values, *options.values()]
    aligned = True
    for x in args:
        if isinstance(x, Tensor):
            key.append(dtype := x.dtype)
            aligned = aligned and (dtype in INTEGERS or x.data_ptr() % 16 == 0)
        else:
            key.append(type(x))  # a variant reads every number in the type of the first launch
    known = tuple(key)
    _, compiled = _compiled.get(known, (kernel, None))
    if compiled is not None and aligned:
        compiled[grid](*args, *values)
        return
    compiled = kernel[grid](*args, *values, **options, **COMPILE_OPTIONS)
    if aligned:
        # Keep the kernel: no other one may get its id. In Triton's interpreter `compiled` is None.
        _compiled[known] = kernel, compiled
