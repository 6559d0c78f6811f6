"""The program that ncu watches for bench/stalls.py: carries out each product once.

    python bench/stalls_target.py FILE DTYPE:MxNxK[:KERNEL] …

What it launched is written to FILE, so that stdout is ncu's.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from numba_gemm.problem import ITEMSIZE, Problem  # noqa: E402
from numba_gemm.spec import KernelLaunch, describe_config  # noqa: E402

#: Random numbers that a matrix is filled with, over and over if it is larger, in bytes.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Product:
    """A product of packed row-major matrices, by the library's own choice or by a kernel."""

    dtype: str
    m: int
    n: int
    k: int
    kernel: str | None = None

    @classmethod
    def parse(cls, text: str) -> Product:
        """``"bfloat16:4096x4096x4096"`` or ``"bfloat16:4096x4096x4096:t4"``.

        Raises
        ------
        ValueError : if it has another form.
        """
        found = re.fullmatch(rf"({'|'.join(ITEMSIZE)}):([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?::([\w-]+))?", text)
        if not found:
            raise ValueError(f"product {text!r} has another form than DTYPE:MxNxK or DTYPE:MxNxK:KERNEL")
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), found[5])

    def __str__(self) -> str:
        return f"{self.dtype}:{self.m}x{self.n}x{self.k}{f':{self.kernel}' if self.kernel else ''}"

    def problem(self) -> Problem:
        """Its problem: alpha 1, beta 0, aligned addresses."""
        return Problem.packed(self.m, self.n, self.k, dtype=self.dtype)


def carry_out(said: Path, products: Sequence[Product]) -> int:
    """Carry out each product once, and say in a file, a JSON object a line, what was launched.

    No other kernels run: the inputs are copied from the host. A product that can't be prepared is passed over; a fault
    in a launch ends the program, since it ends the context.
    """
    from numba_gemm.device.context import current_context
    from numba_gemm.device.memory import DeviceBuffer
    from numba_gemm.device.stream import synchronize_stream
    from numba_gemm.execute import prepare

    with said.open("w", encoding="utf-8") as file:

        def say(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")
            file.flush()

        say(pid=os.getpid())
        context = current_context()
        for product in products:
            launched = False
            try:
                problem = product.problem()
                prepared = prepare(problem, product.kernel, context)
                size = ITEMSIZE[product.dtype]
                with (
                    DeviceBuffer(size * product.m * product.k, 0) as a,
                    DeviceBuffer(size * product.k * product.n, 0) as b,
                    DeviceBuffer(size * product.m * product.n, 0) as c,
                    DeviceBuffer(prepared.workspace_bytes, 0) as workspace,
                ):
                    for seed, buffer in enumerate((a, b)):
                        fill(buffer.pointer, buffer.nbytes, product.dtype, seed)
                    say(
                        product=str(product),
                        kernel=prepared.spec.name,
                        config=describe_config(prepared.config),
                        launches=described([step.launch for step in prepared.steps], prepared.main),
                    )
                    launched = True
                    prepared.launch(a.pointer, b.pointer, c.pointer, 0, workspace=workspace.pointer)
                    synchronize_stream(0, after=str(product))
                    say(product=str(product), done=True)
                synchronize_stream(0, after=f"memory of {product}")
            except Exception as error:
                say(product=str(product), error=f"{type(error).__name__}: {error}"[:500], fatal=launched)
                if launched:
                    raise
    return 0


def described(launches: Sequence[KernelLaunch], first: int) -> list[dict[str, Any]]:
    """Name, grid and block of each launch, and whether it multiplies: ``first``, and later ones of its kernel."""
    main = launches[first].spec.name
    return [
        {
            "name": one.spec.entry(one.config),
            "grid": list(one.grid),
            "block": one.geometry.threads,
            "main": index >= first and one.spec.name == main,
        }
        for index, one in enumerate(launches)
    ]


def fill(pointer: int, nbytes: int, dtype: str, seed: int) -> None:
    """Copy normal random numbers to device memory and wait: the same `BLOCK_BYTES` of them, over and over."""
    import numpy as np

    from numba_gemm.arrays.operand import numpy_dtype
    from numba_gemm.device.memory import copy_to_device
    from numba_gemm.device.stream import synchronize_stream

    count = min(nbytes, BLOCK_BYTES) // ITEMSIZE[dtype]
    numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    block = numbers.astype(numpy_dtype(dtype)).view(np.uint8).reshape(1, -1)
    for start in range(0, nbytes, block.nbytes):
        copy_to_device(pointer + start, block[:, : nbytes - start], 0)
    synchronize_stream(0, after="copying the inputs")


if __name__ == "__main__":
    raise SystemExit(carry_out(Path(sys.argv[1]), [Product.parse(text) for text in sys.argv[2:]]))
