"""Routing on the attention side: gate, top-k and demand in one launch.

A program multiplies one block of tokens by one chunk of the hidden size. The last program of a
block to finish adds the chunks' products in order and routes the tokens; the last to route
publishes the demand. Sums have a fixed order and counts are integers: results repeat bit for bit,
and the tokens beside a token do not change its routing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.launch import LAUNCH_OPTIONS
from afore_kernels.gemm.main_loop import wide_offset
from afore_kernels.partition.demand_buffer import (
    TOKENS_PER_BLOCK,
    DemandBuffer,
    count_token_blocks,
)
from afore_kernels.partition.route_steps import (
    add_bias,
    arrive_last,
    choose_columns,
    limit_groups,
    multiply_chunk,
    weigh_experts,
)
from afore_kernels.partition.router import SIGMOID_EPSILON, RoutedTokens, Router, check_gate

# Hidden columns per program. 64 tokens then read the gate through 32 SMs at H 4096 instead of 4.
# The same for every batch, or a token's logits would depend on the batch.
CHUNK_H = 512
# With 8 warps, 512 columns do not spill on any target.
MAX_COLUMNS = 512
NUM_WARPS = 8
# Gate block in shared memory: two stages fit the 64 KiB of gfx942.
GATE_BLOCK_BYTES = 16384


# A token count of 1 or a multiple of 16 must not compile another kernel while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def _route_tokens_kernel(
    expert_ids_ptr,
    routing_weights_ptr,
    record_ptr,
    totals_ptr,
    arrivals_ptr,
    partial_ptr,
    hidden_ptr,
    weight_ptr,
    logits_bias_ptr,
    correction_bias_ptr,
    stride_hidden_t,
    stride_hidden_h,
    stride_weight_e,
    stride_weight_h,
    stride_logits_bias_e,
    stride_correction_bias_e,
    num_tokens,
    hidden_size,
    num_chunks,
    routed_scaling_factor,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
    CHUNK_H: tl.constexpr,
    EVEN_H: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    EXPERTS_PER_GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    COLUMNS: tl.constexpr = BLOCK_GROUPS * BLOCK_MEMBERS
    token_block = tl.program_id(0) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    offs_t = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tokens
    columns = tl.arange(0, COLUMNS)
    group, member = columns // BLOCK_MEMBERS, columns % BLOCK_MEMBERS
    expert = group * EXPERTS_PER_GROUP + member
    mask_e = (group < NUM_GROUPS) & (member < EXPERTS_PER_GROUP)

    partial = multiply_chunk(
        hidden_ptr,
        weight_ptr,
        stride_hidden_t,
        stride_hidden_h,
        stride_weight_e,
        stride_weight_h,
        offs_t,
        mask_t,
        expert,
        mask_e,
        chunk,
        hidden_size,
        CHUNK_H,
        BLOCK_H,
        EVEN_H,
        UPCAST,
    )
    partial_rows = partial_ptr + wide_offset(offs_t, COLUMNS)[:, None] + columns[None, :]
    stride_partial_chunk = wide_offset(num_tokens, COLUMNS)
    tl.store(partial_rows + chunk * stride_partial_chunk, partial, mask=mask_t[:, None])
    if arrive_last(arrivals_ptr + 1 + token_block, num_chunks):
        logits = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
        for summand in range(num_chunks):
            # From L2: L1 may hold what was there before the other programs wrote.
            logits += tl.load(  # [BLOCK_T, COLUMNS]
                partial_rows + summand * stride_partial_chunk,
                mask=mask_t[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
        if logits_bias_ptr is not None:
            logits = add_bias(logits, logits_bias_ptr, stride_logits_bias_e, expert, mask_e)
        choice = tl.sigmoid(logits) if IS_SIGMOID else logits
        if correction_bias_ptr is not None:
            choice = add_bias(choice, correction_bias_ptr, stride_correction_bias_e, expert, mask_e)
        # The sigmoid of an infinite logit is finite.
        is_finite = (tl.abs(logits) < float("inf")) & (tl.abs(choice) < float("inf"))
        is_routed = tl.min(is_finite.to(tl.int32), axis=1) > 0
        choice = tl.where(mask_e[None, :], choice, -float("inf"))
        if TOPK_GROUPS < NUM_GROUPS:
            choice = limit_groups(choice, TOPK_GROUPS, BLOCK_GROUPS, BLOCK_MEMBERS)
        is_chosen, chosen_columns, chosen_logits = choose_columns(choice, logits, TOP_K, BLOCK_K)
        weights = weigh_experts(chosen_logits, logits, mask_e, IS_SIGMOID, NORMALISE, EPSILON)

        chosen_group = chosen_columns // BLOCK_MEMBERS
        expert_ids = chosen_group * EXPERTS_PER_GROUP + chosen_columns % BLOCK_MEMBERS
        expert_ids = tl.where(is_routed[:, None], expert_ids, -1)
        weights = tl.where(is_routed[:, None], weights * routed_scaling_factor, 0.0)
        offs_k = tl.arange(0, BLOCK_K)
        pairs = wide_offset(offs_t, TOP_K)[:, None] + offs_k[None, :]
        mask_pairs = mask_t[:, None] & (offs_k < TOP_K)[None, :]
        tl.store(expert_ids_ptr + pairs, expert_ids, mask=mask_pairs)
        tl.store(routing_weights_ptr + pairs, weights, mask=mask_pairs)

        # Not tl.histogram, which miscounted ids that come from an argmax (triton #6987).
        is_counted = is_chosen & (is_routed & mask_t)[:, None]
        counts = tl.sum(is_counted.to(tl.int32), axis=0)  # [COLUMNS]
        tl.atomic_add(totals_ptr + expert, counts, mask=mask_e & (counts > 0), sem="relaxed")
        if arrive_last(arrivals_ptr, tl.num_programs(0) // num_chunks):
            # Reads and clears; the AMD backend of Triton 3.6 has no exchange.
            demand = tl.atomic_and(totals_ptr + expert, 0, mask=mask_e, sem="relaxed")
            tl.store(record_ptr + expert, demand, mask=mask_e)
            tl.store(record_ptr + NUM_EXPERTS, tl.load(record_ptr + NUM_EXPERTS) + 1)


def launch_options(router: Router, hidden_size: int, is_16_bit: bool) -> dict[str, Any]:
    """Return the kernel's constexprs, but for UPCAST, and its launch options.

    Args:
        router: the formula.
        hidden_size: H.
        is_16_bit: hidden states and gate have the same 16-bit dtype.

    Raises:
        ShapeError: if the experts need more columns than a program has.
    """
    num_groups = router.num_groups if router.has_group_limit else 1
    block_groups = triton.next_power_of_2(num_groups)
    block_members = triton.next_power_of_2(router.num_experts // num_groups)
    columns = max(16, block_groups * block_members)
    if columns > MAX_COLUMNS:
        raise ShapeError(f"the experts need {columns} columns, a program has {MAX_COLUMNS}")
    block_h = GATE_BLOCK_BYTES // (columns * (2 if is_16_bit else 4))
    return {
        "NUM_EXPERTS": router.num_experts,
        "NUM_GROUPS": num_groups,
        "TOPK_GROUPS": router.topk_groups if router.has_group_limit else 1,
        "TOP_K": router.top_k,
        "IS_SIGMOID": router.score == "sigmoid",
        "NORMALISE": router.normalise,
        "EPSILON": SIGMOID_EPSILON,
        "CHUNK_H": CHUNK_H,
        "EVEN_H": hidden_size % CHUNK_H == 0,
        "BLOCK_T": TOKENS_PER_BLOCK,
        "BLOCK_H": min(max(block_h, 16), 64),
        "BLOCK_GROUPS": block_groups,
        "BLOCK_MEMBERS": columns // block_groups,
        "BLOCK_K": triton.next_power_of_2(router.top_k),
        "num_warps": NUM_WARPS,
        "num_stages": 3 if columns <= 256 else 2,
        **LAUNCH_OPTIONS,
    }


def route_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    router: Router,
    *,
    logits_bias: torch.Tensor | None = None,
    correction_bias: torch.Tensor | None = None,
    demand: DemandBuffer | None = None,
) -> RoutedTokens:
    """Route an attention rank's tokens and count their demand, in one launch (section 6.1).

    Sums are fp32. 16-bit tensors of one dtype are multiplied as they are, others as fp32. With
    `demand` given, a CUDA graph can capture the call.

    Args:
        hidden: [num_tokens, hidden_size], float32, float16 or bfloat16; any strides.
        weight: of the gate, [num_experts, hidden_size], the same dtypes; any strides.
        router: how logits become experts and weights.
        logits_bias: [num_experts] if the router has one.
        correction_bias: [num_experts] if the router has one.
        demand: receives the demand; by default a new buffer, at the cost of clearing it.

    Returns:
        The routing; its demand is `demand.demand`, which the next launch overwrites.

    Raises:
        ShapeError: if a tensor is not what the router or the buffer expects, or the padded groups
            of experts exceed one program.
    """
    check_gate(router, hidden, weight, logits_bias, correction_bias)
    num_tokens, hidden_size = hidden.shape
    device = hidden.device
    if demand is None:
        demand = DemandBuffer.allocate(router.num_experts, num_tokens, device)
    demand.check(router.num_experts, num_tokens, device)
    is_16_bit = hidden.dtype == weight.dtype != torch.float32
    options = launch_options(router, hidden_size, is_16_bit)
    columns = options["BLOCK_GROUPS"] * options["BLOCK_MEMBERS"]
    # The interpreter's bf16 product is wrong (triton #11584).
    is_wrong_product = triton.knobs.runtime.interpret and hidden.dtype == torch.bfloat16
    num_chunks = triton.cdiv(hidden_size, CHUNK_H)
    expert_ids = torch.empty(num_tokens, router.top_k, dtype=torch.int32, device=device)
    routing_weights = torch.empty(num_tokens, router.top_k, dtype=torch.float32, device=device)
    _route_tokens_kernel[(count_token_blocks(num_tokens) * num_chunks,)](
        expert_ids,
        routing_weights,
        demand.record,
        demand.totals,
        demand.arrivals,
        torch.empty(num_chunks, num_tokens, columns, dtype=torch.float32, device=device),
        hidden,
        weight,
        logits_bias,
        correction_bias,
        *hidden.stride(),
        *weight.stride(),
        0 if logits_bias is None else logits_bias.stride(0),
        0 if correction_bias is None else correction_bias.stride(0),
        num_tokens,
        hidden_size,
        num_chunks,
        router.routed_scaling_factor,
        UPCAST=not is_16_bit or is_wrong_product,
        **options,
    )
    return RoutedTokens(expert_ids, routing_weights, demand.demand)
