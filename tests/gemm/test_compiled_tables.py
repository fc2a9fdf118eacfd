"""Every heuristic launch, compiled for its architecture as it is launched; no GPU is needed."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton

from afore_kernels.gemm import down, gate_up, main_loop
from afore_kernels.gemm.launch import TILE_M_CHOICES, GemmConfig, heuristic_launch
from bench.cross_compile import CompileJob, KernelReport, compile_all, compile_kernel
from bench.gemm_jobs import make_gemm_jobs
from bench.occupancy import ARCHITECTURES, Architecture
from bench.shapes import DEEPSEEK_V3, GLM_4_5_AIR, GPT_OSS_20B, Model

GLM = GLM_4_5_AIR.config
MODELS = {
    "plain": GLM_4_5_AIR,
    "bias": replace(GLM_4_5_AIR, config=replace(GLM, has_bias=True)),
    "fp8_block": DEEPSEEK_V3,
    "fp8_channel": replace(GLM_4_5_AIR, weight_format="fp8_channel"),
    "mxfp4": GPT_OSS_20B,
}
# Variants of the plain rows, which they share: one tile size tells.
VARIANTS = {
    "float16": (replace(GLM_4_5_AIR, config=replace(GLM, dtype="float16")), 64),
    "float32": (replace(GLM_4_5_AIR, config=replace(GLM, dtype="float32")), 16),
    # No block divides these sizes: every load and store is masked.
    "uneven": (
        replace(
            GLM_4_5_AIR,
            config=replace(GLM, hidden_size=1000, intermediate_size=600, has_bias=True),
        ),
        128,
    ),
}
# What Triton 3.6 does worse; the kernels run there, slower.
IS_OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
SPILL_ON_OLD_TRITON = {"sm100-mxfp4-128-gate_up", "sm100-float32-16-gate_up"}
KIND = {"sm80": "mma", "sm90": "wgmma", "sm100": "tcgen05", "gfx942": "mfma"}


class Row(NamedTuple):
    """One GEMM of one row of the tables."""

    architecture: Architecture
    name: str
    model: Model
    tile_m: int
    gemm: str

    @property
    def config(self) -> GemmConfig:
        launch = heuristic_launch(
            self.architecture.name,
            self.tile_m,
            dtype=getattr(torch, self.model.config.dtype),
            weight_format=self.model.weight_format,
            has_bias=self.model.config.has_bias,
        )
        return getattr(launch, self.gemm)

    @property
    def job(self) -> CompileJob:
        return getattr(make_gemm_jobs(self.model, self.architecture, self.tile_m), self.gemm)


ROWS = {
    f"{architecture.name}-{name}-{tile_m}-{gemm}": Row(architecture, name, model, tile_m, gemm)
    for architecture in ARCHITECTURES
    for name, model, tile_m in (
        *((name, model, tile_m) for name, model in MODELS.items() for tile_m in TILE_M_CHOICES),
        *((name, *variant) for name, variant in VARIANTS.items()),
    )
    for gemm in ("gate_up", "down")
}


@pytest.fixture(scope="module")
def reports() -> dict[str, KernelReport]:
    return dict(zip(ROWS, compile_all([row.job for row in ROWS.values()])))


@pytest.mark.parametrize("name", ROWS)
def test_row_compiles_to_what_the_table_promises(name, reports):
    row, report = ROWS[name], reports[name]
    assert not report.has_spills or (IS_OLD_TRITON and name in SPILL_ON_OLD_TRITON)
    assert report.ctas_per_sm >= row.config.programs_per_sm
    assert set(report.tensor_core) == {KIND[row.architecture.name]}
    assert report.main_loop_tensor_core > 0


# The sizes of fp32, wgmma and tcgen05 products are not fixed.
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, row in ROWS.items()
        if row.architecture.name in ("sm80", "gfx942") and row.name != "float32"
    ],
)
def test_no_warp_repeats_the_product_of_another(name, reports):
    """With more warps than the tile has parts, Triton lets some compute the same again."""
    row, config = ROWS[name], ROWS[name].config
    # Products of one instruction of a warp: 16 x 8 x 16; 16 x 16 x 16, 32 x 32 x 8 if it fits.
    per_instruction = 2048 if row.architecture.name == "sm80" else 4096
    if row.architecture.name == "gfx942" and row.tile_m >= 32:
        per_instruction = 8192
    num_parts = 2 if row.gemm == "gate_up" else 1
    products = num_parts * row.tile_m * config.block_n * config.block_k
    computed = reports[name].main_loop_tensor_core * per_instruction * config.num_warps
    assert computed == products


@pytest.fixture(scope="module")
def narrow_kernels(tmp_path_factory):
    """The kernels with offsets in 32 bits, as they would be without the cast."""
    folder = tmp_path_factory.mktemp("narrow")
    cast = "tl.cast(index, tl.int64) * stride"
    source = inspect.getsource(main_loop)
    assert cast in source
    (folder / "narrow_main_loop.py").write_text(source.replace(cast, "index * stride"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        kernels = {}
        for module in (gate_up, down):
            name = module.__name__.rpartition(".")[2]
            source = inspect.getsource(module).replace(main_loop.__name__, "narrow_main_loop")
            (folder / f"narrow_{name}.py").write_text(source)
            narrow = importlib.import_module(f"narrow_{name}")
            kernels[name] = getattr(narrow, f"_{name}_kernel")
        yield kernels


@pytest.mark.skipif(IS_OLD_TRITON, reason="Triton 3.6 lengthens some main loops by up to 12 %")
@pytest.mark.parametrize("gemm", ["gate_up", "down"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_wide_offsets_cost_no_occupancy(architecture, gemm, reports, narrow_kernels):
    name = f"{architecture.name}-plain-16-{gemm}"
    narrow = compile_kernel(*ROWS[name].job._replace(kernel=narrow_kernels[gemm]))
    wide = reports[name]
    assert wide.ctas_per_sm == narrow.ctas_per_sm
    # Registers are handed out in steps of 8; what widening all strides costs is far more.
    assert wide.registers <= narrow.registers + 8
    assert wide.main_loop <= narrow.main_loop * 1.02
