"""Operations on packed bags that are faster than those of torch: plain torch, and Triton beside it for CUDA.

in     packed tensors and a layout
out    the same numbers as a loop over the bags, and their gradients
first  products.py
"""
