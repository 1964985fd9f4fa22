"""Operations on rows of bags of different length, stacked over configurations: torch on the CPU, Triton on CUDA."""
