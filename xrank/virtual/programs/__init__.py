"""Programs as data: instructions and registers, the program builder, and the kernels that programs call by name."""
