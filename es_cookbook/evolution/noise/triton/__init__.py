"""The noise as Triton kernels, for CUDA."""
