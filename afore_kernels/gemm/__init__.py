"""The expert FFN over tiles of pairs: gate_up GEMM, activation, down GEMM, weighted combine.

This package knows nothing of plans or processes: it is given the pairs of every slot as tiles.
"""
