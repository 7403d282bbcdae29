"""Everything that Numba or LLVM compiles."""
