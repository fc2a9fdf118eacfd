from __future__ import annotations

import pytest

from bench.assembly import (
    AssemblyError,
    Instruction,
    count_global_loads,
    count_tensor_core,
    find_loops,
    find_main_loop,
    parse_amdgcn,
    parse_sass,
    tensor_core_kind,
)


def make_sass(*lines: str, name: str = "kernel") -> str:
    """Lay instructions out as cuobjdump does, 16 bytes apart."""
    text = f"\n\tcode for sm_90a\n\t\tFunction : {name}\n"
    for i, line in enumerate(lines):
        text += f"        /*{16 * i:04x}*/  {line} ;   /* 0x00000a00ff017b82 */\n"
        text += f"{' ' * 60}/* 0x000e620000000800 */\n"
    return text


def test_sass_branches():
    code = parse_sass(
        make_sass(
            "@!P0 BRA 0x40",
            "BRA.U UP0, 0x0",
            "@P1 EXIT",
            "BRA 0x10",
            "EXIT",
            "BSYNC.RECONVERGENT B0",
        ),
        "kernel",
    )
    assert code == [
        Instruction("BRA", 4, True),
        Instruction("BRA.U", 0, True),
        Instruction("EXIT", None, True),
        Instruction("BRA", 1, False),
        Instruction("EXIT", None, False),
        Instruction("BSYNC.RECONVERGENT", None, True),
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(make_sass(), id="no-instruction"),
        pytest.param(make_sass("EXIT", name="other"), id="other-kernel"),
        pytest.param(make_sass("EXIT") + make_sass("EXIT"), id="two-kernels"),
        pytest.param(make_sass("BRX R4 -0x20"), id="indirect-branch"),
        pytest.param(make_sass("BRA 0x990"), id="branch-out-of-the-kernel"),
        pytest.param(make_sass("{ 12"), id="unknown-text"),
        pytest.param(make_sass("EXIT").replace(";", ""), id="unknown-line"),
    ],
)
def test_sass_that_is_not_understood_raises(text):
    with pytest.raises(AssemblyError):
        parse_sass(text, "kernel")


AMD_KERNEL = """\
kernel:                                 ; @kernel
.Lfunc_begin0:
; %bb.0:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	global_load_dwordx4 v[2:5], v[2:3], off ; 16-byte Folded Reload
	v_mfma_f32_32x32x8_bf16 a[0:15], v[74:75], v[26:27], a[0:15]
	s_cbranch_scc1 .LBB0_1
	s_branch .LBB0_2
.LBB0_2:
	s_endpgm
.Lfunc_end0:
	v_not_of_this_kernel v0
"""


def test_amd_branches():
    code = parse_amdgcn(AMD_KERNEL, "kernel")
    assert [(i.opcode, i.target, i.falls_through) for i in code[1:]] == [
        ("global_load_dwordx4", None, True),
        ("v_mfma_f32_32x32x8_bf16", None, True),
        ("s_cbranch_scc1", 1, True),
        ("s_branch", 5, False),
        ("s_endpgm", None, False),
    ]
    assert count_tensor_core(code) == {"mfma": 1}
    assert count_global_loads(code) == {"global_load_dwordx4": 1}
    assert find_main_loop(code) == code[1:4]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("kernel:", "other:", id="other-kernel"),
        pytest.param("s_endpgm", "s_setpc_b64 s[30:31]", id="indirect-branch"),
        pytest.param("s_cbranch_scc1 .LBB0_1", "s_cbranch_scc1 .LBB0_9", id="no-such-label"),
        pytest.param("s_endpgm", "?", id="unknown-line"),
    ],
)
def test_amd_assembly_that_is_not_understood_raises(old, new):
    with pytest.raises(AssemblyError):
        parse_amdgcn(AMD_KERNEL.replace(old, new), "kernel")


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.16816.F32.BF16", "mma"),
        ("IMMA.16832.S8.S8", "mma"),
        ("HGMMA.64x128x16.F32.BF16", "wgmma"),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "wgmma"),
        ("UTCHMMA", "tcgen05"),
        ("UTCQMMA.2CTA", "tcgen05"),
        ("v_mfma_f32_16x16x16_bf16", "mfma"),
        ("v_smfmac_f32_16x16x32_bf16", "mfma"),
        ("UTCBAR", None),
        ("UTCATOMSWS.AND", None),
        ("WARPGROUP.ARRIVE", None),
        ("FFMA", None),
        ("v_fma_f32", None),
    ],
)
def test_tensor_core_kind(opcode, kind):
    assert tensor_core_kind(opcode) == kind


def test_global_loads_are_named_by_width():
    opcodes = [
        "LDG.E",
        "LDG.E.U16",
        "LDG.E.LTC128B.128.CONSTANT",
        "LDGSTS.E.BYPASS.128",
        "UTMALDG.4D",
        "buffer_load_dwordx4",
        "buffer_load_dword",
        "LDS.128",
        "LDGDEPBAR",
        "s_load_dwordx2",
    ]
    assert count_global_loads(map(Instruction, opcodes)) == {
        "LDG.32": 1,
        "LDG.16": 1,
        "LDG.128": 1,
        "LDGSTS.128": 1,
        "UTMALDG": 1,
        "buffer_load_dwordx4": 1,
        "buffer_load_dword": 1,
    }


def test_main_loop_is_the_innermost_with_most_tensor_core_instructions():
    code = parse_sass(
        make_sass(
            "NOP",  # 0x00: the outer loop, over tiles
            "HMMA.16816.F32",  # 0x10: a peeled loop
            "@P0 BRA 0x10",
            "HMMA.16816.F32",  # 0x30: the main loop
            "FFMA R0, R0, R0, R0",
            "HMMA.16816.F32",
            "@P0 BRA 0x30",
            "@P1 BRA 0x0",
            "EXIT",
        ),
        "kernel",
    )
    assert sorted(map(sorted, find_loops(code))) == [[*range(8)], [1, 2], [3, 4, 5, 6]]
    assert find_main_loop(code) == code[3:7]


def test_a_backward_branch_from_a_moved_slow_path_is_no_loop():
    code = parse_sass(
        make_sass(
            "@!P0 BRA 0x40",
            "HMMA.16816.F32",  # 0x10
            "EXIT",
            "NOP",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0",  # 0x40: behind the kernel
            "@!P0 BRA 0x40",
            "BRA 0x10",
            "BRA 0x70",  # what follows the end is never reached
        ),
        "kernel",
    )
    assert find_loops(code) == [{4, 5}]
    assert find_main_loop(code) is None
