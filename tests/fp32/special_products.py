"""Products in emulated memory for the kernels of special shapes: layouts, strides, batches, and their references."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_gemm.emulate import run_form
from numba_gemm.emulator.machine import Machine
from numba_gemm.problem import Problem
from numba_gemm.spec import Addresses, KernelSpec
from numba_gemm.validate import check, reference


@dataclass(frozen=True)
class Product:
    """One product, or a batch, and how its matrices lie; ``pad`` elements between lines, ``skew`` before the first."""

    m: int
    n: int
    k: int
    a_layout: str = "row"
    b_layout: str = "row"
    pad: int = 0
    skew: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    shared: str = ""  # "A", "B": all products of the batch use the same one
    inputs: str = "random"
    backwards: bool = False  # negative leading dimensions

    def __str__(self) -> str:
        fields = [f"{self.m}x{self.n}x{self.k}", self.a_layout, self.b_layout]
        for name in ("pad", "skew", "batch", "shared", "backwards"):
            if getattr(self, name) != Product.__dataclass_fields__[name].default:
                fields.append(f"{name}{getattr(self, name)}")
        if (self.alpha, self.beta) != (1.0, 0.0):
            fields.append(f"{self.alpha:g},{self.beta:g}")
        return "-".join(fields + ([self.inputs] if self.inputs != "random" else []))


def run(spec: KernelSpec, product: Product, *, sm_count: int = 4, arch=(9, 0), config=None):
    """Run a product on the emulator, check it, and return (C of all products, report of the first launch, config)."""
    p = product
    rng = np.random.default_rng([p.m, p.n, p.k, p.batch])
    a_count, b_count = (1 if p.shared == "A" else p.batch), (1 if p.shared == "B" else p.batch)

    def draw(count, rows, columns):
        if p.inputs == "infinite":  # the last term of every sum is infinite, and nothing is negative
            matrix = rng.uniform(1, 2, (count, rows, columns)).astype(np.float32)
            matrix[:, :, p.k - 1 :] = np.inf if columns == p.k else 1
            return matrix
        if p.inputs == "integer":
            return rng.integers(-4, 5, (count, rows, columns)).astype(np.float32)
        return rng.standard_normal((count, rows, columns)).astype(np.float32)

    a, b, c = draw(a_count, p.m, p.k), draw(b_count, p.k, p.n), draw(p.batch, p.m, p.n)
    machine = Machine(f"sm_{arch[0]}{arch[1]}")

    def place(matrices, column, written=True):
        """(address of the first element, leading dimension, batch stride)."""
        lines = matrices.swapaxes(1, 2) if column else matrices
        count, rows, columns = lines.shape
        lead = columns + p.pad
        apart = rows * lead + (4 if p.pad % 4 == 0 else 1)
        base = machine.alloc(4 * (p.skew + count * apart)) + 4 * p.skew
        for i in range(count):
            for row in range(rows):
                at = row if not p.backwards else rows - 1 - row
                if written and columns:
                    machine.write(base + 4 * (i * apart + at * lead), np.ascontiguousarray(lines[i, row]))
        first = base + (4 * (rows - 1) * lead if p.backwards and rows else 0)
        return first, -lead if p.backwards else lead, apart if count > 1 else 0

    a_at, lda, a_apart = place(a, p.a_layout == "column")
    b_at, ldb, b_apart = place(b, p.b_layout == "column")
    c_at, ldc, c_apart = place(c, False, written=p.beta != 0)
    problem = Problem(
        p.m, p.n, p.k, lda=lda, ldb=ldb, ldc=ldc, a_offset=a_at % 16, b_offset=b_at % 16, c_offset=c_at % 16,
        alpha=p.alpha, beta=p.beta, a_layout=p.a_layout, b_layout=p.b_layout, batch=p.batch,
        batch_stride_a=a_apart, batch_stride_b=b_apart, batch_stride_c=c_apart,
    )  # fmt: skip
    if config is None:
        config = spec.select(problem, sm_count, arch)
    elif callable(config):
        config = config(problem)
    report = run_form(machine, problem, spec, config, Addresses(a_at, b_at, c_at), arch)
    result = np.empty_like(c)
    for i in range(p.batch):
        for row in range(p.m):
            result[i, row] = machine.read(c_at + 4 * (i * c_apart + row * ldc), np.dtype(np.float32), p.n)
        if p.inputs == "infinite":
            assert np.isposinf(result[i]).all()
            continue
        expected = reference(a[i % a_count], b[i % b_count], c[i], alpha=p.alpha, beta=p.beta)
        verdict = check(result[i], expected, exact=p.inputs == "integer")
        assert verdict, f"product {i} with {dict(config)}: {verdict.message}"
    return result, report, config
