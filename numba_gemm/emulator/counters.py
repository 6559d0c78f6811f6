"""What a launch counts, and the Nsight Compute metric that each count should equal."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Counters:
    """Totals over all blocks that ran. Counts of PTX instructions, not of the SASS they are assembled to.

    Attributes
    ----------
    instructions : instructions executed by warps (a warp counts once, however many lanes are active).
    thread_instructions : the same by threads whose predicate held.
    instructions_by_class : `instructions` by opcode class ("fma", "ld.shared", "bar", "mma", …).
    ffma_threads, fadd_threads, fmul_threads : FP32 multiply-adds, additions, multiplications by threads.
    mma_instructions : tensor-core instructions (`mma`, `wmma.mma`) by warps.
    shared_load_requests, shared_store_requests : shared-memory instructions by warps.
    shared_load_wavefronts, shared_store_wavefronts : passes over the banks that those took.
    shared_load_conflicts, shared_store_conflicts : passes beyond what the same accesses need without conflicts.
    global_load_requests, global_store_requests : global-memory instructions by warps.
    global_load_sectors, global_store_sectors : 32-byte sectors that those touched.
    local_load_requests, local_store_requests : local-memory instructions by warps.
    atomics : atomic operations by warps.
    barriers : barrier instructions by warps.
    async_copies : `cp.async` instructions by warps.
    tensor_loads, tensor_stores : `cp.async.bulk.tensor` copies, one for each thread that issues one.
    tensor_load_bytes, tensor_store_bytes : shared memory that those wrote (in every block that a multicast reaches) and
        read, elements outside of the tensor included.
    bulk_loads, bulk_stores, bulk_load_bytes, bulk_store_bytes : the same of `cp.async.bulk` without a tensor map.
    wgmma_instructions : `wgmma.mma_async` by warps (four for each product).
    mbarrier_operations : `mbarrier` instructions by warps.
    """

    instructions: int = 0
    thread_instructions: int = 0
    ffma_threads: int = 0
    fadd_threads: int = 0
    fmul_threads: int = 0
    mma_instructions: int = 0
    shared_load_requests: int = 0
    shared_store_requests: int = 0
    shared_load_wavefronts: int = 0
    shared_store_wavefronts: int = 0
    shared_load_conflicts: int = 0
    shared_store_conflicts: int = 0
    global_load_requests: int = 0
    global_store_requests: int = 0
    global_load_sectors: int = 0
    global_store_sectors: int = 0
    local_load_requests: int = 0
    local_store_requests: int = 0
    atomics: int = 0
    barriers: int = 0
    async_copies: int = 0
    tensor_loads: int = 0
    tensor_load_bytes: int = 0
    tensor_stores: int = 0
    tensor_store_bytes: int = 0
    bulk_loads: int = 0
    bulk_load_bytes: int = 0
    bulk_stores: int = 0
    bulk_store_bytes: int = 0
    wgmma_instructions: int = 0
    mbarrier_operations: int = 0
    instructions_by_class: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, int]:
        """The plain counts by name, without the classes."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "instructions_by_class"}


NCU_METRICS: dict[str, str] = {
    "instructions": "smsp__inst_executed.sum",
    "thread_instructions": "smsp__thread_inst_executed_pred_on.sum",
    "ffma_threads": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "fadd_threads": "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
    "fmul_threads": "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
    "mma_instructions": "sm__inst_executed_pipe_tensor.sum",
    "shared_load_requests": "smsp__inst_executed_op_shared_ld.sum",
    "shared_store_requests": "smsp__inst_executed_op_shared_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "local_load_requests": "l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum",
    "local_store_requests": "l1tex__t_requests_pipe_lsu_mem_local_op_st.sum",
    "barriers": "smsp__inst_executed_pipe_adu.sum",
    "async_copies": "smsp__inst_executed_op_ldgsts.sum",
}
"""Counter field to the ncu metric that counts the same thing (for instruction counts: in SASS)."""


def opcode_class(op: str, mods: tuple[str, ...]) -> str:
    """The class under which an instruction is counted."""
    if op in ("ld", "st", "atom", "red", "ldu"):
        for mod in mods:
            space = mod.split("::")[0]
            if space in ("global", "shared", "local", "param", "const"):
                return f"{op}.{space}"
        return f"{op}.generic"
    if op in ("fma", "add", "mul", "sub", "mad", "min", "max", "neg", "abs", "div") and mods:
        kind = mods[-1]
        if kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
            return f"{op}.{kind}"
        return f"{op}.int"
    if op in ("barrier", "bar"):
        return "bar"
    if op == "cp":
        return "cp.async.bulk" if "bulk" in mods else "cp.async"
    if op in ("wmma", "wgmma"):
        return f"{op}.{mods[0]}"
    return op
