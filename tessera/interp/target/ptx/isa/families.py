"""Instruction families: importing this module fills the rule tables with all of them."""

from tessera.interp.target.ptx.isa import (
    async_copy,
    atomics,
    comparison,
    control_flow,
    conversion,
    data_movement,
    decoder,
    floating_point,
    integer_arithmetic,
    logic_and_shift,
    mbarrier,
    mma,
    system_calls,
    tensor_copy,
    texture_access,
    video,
    warp,
    wgmma,
)

INSTRUCTION_FAMILIES = (
    async_copy,
    atomics,
    logic_and_shift,
    async_copy,
    control_flow,
    comparison,
    control_flow,
    conversion,
    floating_point,
    integer_arithmetic,
    mma,
    mbarrier,
    data_movement,
    system_calls,
    tensor_copy,
    texture_access,
    video,
    warp,
    wgmma,
    mma,
)

# Opcodes with integer and float forms: the instruction type selects the table.
decoder.merge_typed_rules()
