"""CUDA kernels for attention, generated from the IR as TensorIR and exported as one CUDA C++ file."""
