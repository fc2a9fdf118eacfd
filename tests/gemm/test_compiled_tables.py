"""Every heuristic launch, compiled for its architecture as it is launched: no GPU needed."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest
import torch

from afore_kernels.gemm import down, gate_up, main_loop
from afore_kernels.gemm.launch import TILE_M_CHOICES, GemmConfig, heuristic_launch
from bench.cross_compile import CompileJob, KernelReport, compile_all, compile_kernel
from bench.gemm_jobs import make_gemm_jobs
from bench.occupancy import ARCHITECTURES, SM80, SM90, SM100, Architecture
from bench.shapes import DEEPSEEK_V3, GLM_4_5_AIR, GPT_OSS_20B, Model

GLM = GLM_4_5_AIR.config
MODELS = {
    "plain": GLM_4_5_AIR,
    "bias": replace(GLM_4_5_AIR, config=replace(GLM, has_bias=True)),
    "fp8_block": DEEPSEEK_V3,
    "fp8_channel": replace(GLM_4_5_AIR, weight_format="fp8_channel"),
    "mxfp4": GPT_OSS_20B,
    "float16": replace(GLM_4_5_AIR, config=replace(GLM, dtype="float16")),
    "float32": replace(GLM_4_5_AIR, config=replace(GLM, dtype="float32")),
    # No block divides these: every load and store is masked.
    "uneven": replace(
        GLM_4_5_AIR, config=replace(GLM, hidden_size=577, intermediate_size=859, has_bias=True)
    ),
}
KIND = {"sm80": "mma", "sm90": "wgmma", "sm100": "tcgen05", "gfx942": "mfma"}
