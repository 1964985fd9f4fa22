"""Operations on bags of different lengths, stacked over configurations: torch on the CPU, Triton on CUDA."""
