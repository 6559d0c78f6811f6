"""Plan: a product that was checked, chosen and arranged once, to be carried out on other arrays of the same form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_gemm.arrange import Arrangement
from numba_gemm.arrays import Operand, as_operand, as_stream, empty_like_operand, probe_for, wrap_result
from numba_gemm.problem import ALIGNMENT, Problem, check_output, placed_by
from numba_gemm.spec import Config, KernelSpec, describe_config
from numba_gemm.stack import ProductShape

if TYPE_CHECKING:
    from numba_gemm.calls import Call, Fast
    from numba_gemm.execute import Prepared

#: Carries a checked product out on host arrays.
HostRun = Callable[[Operand, Operand, Operand], None]


@dataclass(frozen=True)
class Form:
    """What an argument of a plan must be like: everything but where it lies."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    on_device: bool

    @classmethod
    def of(cls, operand: Operand) -> Form:
        """The form of an operand. Strides along axes of one element, or of an empty array, don't count."""
        empty = 0 in operand.shape
        strides = tuple(
            0 if empty or extent == 1 else stride for extent, stride in zip(operand.shape, operand.strides, strict=True)
        )
        return cls(operand.name, operand.shape, strides, operand.dtype, operand.on_device)

    def __str__(self) -> str:
        where = "a GPU" if self.on_device else "host memory"
        return (
            f"{self.name} with shape {self.shape}, strides {self.strides} (elements) and dtype {self.dtype} on {where}"
        )


class Plan:
    """A product that was checked and arranged once; ``p(a, b, out=c)`` carries it out.

    Made by :func:`numba_gemm.plan`. A call takes arrays with the shapes, strides, dtypes and place (host or GPU) of
    those that the plan was made for; where they lie may differ, also in alignment. Plans may be called from several
    threads and on any stream of their context, and while a stream is captured into a CUDA graph.

    Attributes
    ----------
    kernel : name of the kernel; ``"numpy"`` for NumPy's BLAS on the CPU.
    config : its form, name → value.
    workspace_bytes : device memory that a call borrows, in the order of its stream.
    shape : (m, n, k) of one product.
    batch : the axes that products are stacked along.
    """

    def __init__(
        self,
        operands: tuple[Operand, Operand, Operand],
        shape: ProductShape,
        scales: tuple[float, float, str | None],
        *,
        chosen: Arrangement | Prepared | None,
        run_on_host: HostRun | None,
    ) -> None:
        a, b, c = operands
        self.shape = (shape.m, shape.n, shape.k)
        self.batch = shape.batch
        self.kernel = chosen.spec.name if chosen else (scales[2] or "numpy")
        self.config: dict[str, int | str] = dict(chosen.config) if chosen else {}
        self.workspace_bytes = chosen.workspace_bytes if chosen else 0
        self._product = shape
        self._scales = scales
        self._chosen = chosen
        self._run_on_host = run_on_host
        self._forms = (Form.of(a), Form.of(b), Form.of(c))
        self._c_dtype = c.dtype
        # What probes say of arrays that were found to have the form, and the calls by alignment.
        self._known: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self._calls: dict[tuple[int, ...], Call] = {}
        self._fast: Fast | None = None  # of the arrays that went through the full checks last

    def __call__(self, a: Any, b: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Carry the product out.

        Parameters
        ----------
        a, b, out : arrays of the forms that the plan was made for. Without ``out`` the result is a new array; a plan
            whose ``beta`` isn't 0 needs it.
        stream : for device arrays: where to run, as for :func:`numba_gemm.matmul`.

        Returns
        -------
        ``out`` or the new array; on a GPU the call returns before the product is done.

        Raises
        ------
        ValueError, TypeError : for arrays of another form, the message names both forms; without an ``out`` that
            ``beta`` is to scale. ``out`` is then untouched.
        """
        if stream is None:
            fast = self._fast
            if fast is not None and fast(a, b, out):
                return out
            handle = None
        else:
            handle = as_stream(stream)
        if out is not None and self._run_on_host is None and self._repeat(a, b, out, handle):
            return out
        return self._in_full(a, b, out, handle)

    def _repeat(self, a: Any, b: Any, c: Any, stream: int | None) -> bool:
        """The product of arrays whose forms and alignment were met before; False if they weren't."""
        a_probe, b_probe, c_probe = probe_for(a), probe_for(b), probe_for(c)
        if a_probe is None or b_probe is None or c_probe is None:
            return False
        a_form, b_form, c_form = a_probe(a), b_probe(b), c_probe(c)
        known_a, known_b, known_c = self._known
        if a_form[1:4] not in known_a or b_form[1:4] not in known_b or c_form[1:4] not in known_c:
            return False
        pointers = (a_form[0], b_form[0], c_form[0])
        call = self._calls.get(tuple(pointer % ALIGNMENT for pointer in pointers))
        if call is None:
            return False
        a_pointer, b_pointer, c_pointer = pointers
        a_stream, b_stream, c_stream = a_form[4], b_form[4], c_form[4]
        if stream is None:
            if not a_stream == b_stream == c_stream:
                return False
            stream = c_stream
        elif not a_stream == b_stream == c_stream == stream:
            from numba_gemm.device.lifetime import keep_until_done

            if not call.repeat(a_pointer, b_pointer, c_pointer, stream):
                return False
            keep_until_done(stream, (a, b, c))  # their package may free them in the order of another stream
            return True
        return call.repeat(a_pointer, b_pointer, c_pointer, stream)

    def _in_full(self, a: Any, b: Any, out: Any, stream: int | None) -> Any:
        """The product with every check that a call without a plan has."""
        a_operand, b_operand = as_operand("a", a, stream=stream or 0), as_operand("b", b, stream=stream or 0)
        self._check(a_operand, self._forms[0])
        self._check(b_operand, self._forms[1])
        given = out is not None
        if not given:
            if self._scales[1] != 0:
                raise TypeError(f"this plan's beta is {self._scales[1]} and out is None; pass out, which it scales")
            out = empty_like_operand(placed_by(a_operand, b_operand), self._product.result, stream, self._c_dtype)
        c_operand = as_operand(self._forms[2].name, out, stream=stream or 0)
        self._check(c_operand, self._forms[2])
        check_output(c_operand, a_operand, b_operand, self._product)
        if self._run_on_host is not None and stream is not None:
            raise TypeError(
                "stream is given, but a and b are in host memory: their product is done on return; leave stream out"
            )
        if 0 not in self._product.result:
            if self._run_on_host is not None:
                self._run_on_host(a_operand, b_operand, c_operand)
            else:
                self._on_device(a_operand, b_operand, c_operand, (a, b, out), stream)
        return out if given else wrap_result(out, (a, b), stream)

    def _on_device(self, a: Operand, b: Operand, c: Operand, arrays: tuple[Any, Any, Any], stream: int | None) -> None:
        """A product on the GPU, kept to be repeated at once on arrays with the same alignment."""
        from numba_gemm.calls import make_fast, multiply_device, several_gpus

        call = multiply_device(a, b, c, self._product, self._scales, stream)
        if several_gpus():
            return
        self._calls[(a.pointer % ALIGNMENT, b.pointer % ALIGNMENT, c.pointer % ALIGNMENT)] = call
        for known, array in zip(self._known, arrays, strict=True):
            probe = probe_for(array)
            form = None if probe is None else probe(array)[1:4]
            if form is not None and form not in known:
                known.append(form)
        self._fast = make_fast(arrays, call)

    def _check(self, operand: Operand, form: Form) -> None:
        found = Form.of(operand)
        if found == form:
            return
        kind = TypeError if found.on_device != form.on_device or found.dtype != form.dtype else ValueError
        raise kind(f"this plan is for {form}; {found} needs a plan of its own: numba_gemm.plan(a, b, out)")

    def explain(self) -> str:
        """What a call does: the kernel, its form and launches, what is copied first and why, as text of a few lines."""
        m, n, k = self.shape
        stack = f"{'×'.join(map(str, self.batch))} products, each " if self.batch else ""
        dtype = self._forms[0].dtype
        lines = [f"{stack}{m}×{n}×{k} (M×N×K), {dtype}{'' if self._c_dtype == dtype else f' to {self._c_dtype}'}"]
        if 0 in self._product.result:
            return "\n".join([*lines, "the result has no elements: nothing is launched"])
        chosen = self._chosen
        if chosen is None:
            what = "NumPy's BLAS" if self.kernel == "numpy" else f"kernel {self.kernel}"
            return "\n".join([*lines, f"computed on the CPU by {what}"])
        lines += explain_launches(chosen.problem, chosen.spec, chosen.config)
        lines += chosen.notes
        launches = chosen.launch_count
        lines.append(
            f"{launches} launch{'' if launches == 1 else 'es'}"
            + (
                f", {self.workspace_bytes:,} bytes of workspace borrowed in stream order"
                if self.workspace_bytes
                else ""
            )
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<numba_gemm.Plan: {self.explain().splitlines()[0]}, kernel {self.kernel!r}>"


def explain_launches(problem: Problem, spec: KernelSpec, config: Config) -> list[str]:
    """The kernel of a product, its form and its tiles, in words."""
    geometry = spec.geometry(config)
    block_m, block_n, block_k = geometry.block_tile
    tiles = math.ceil(problem.m / block_m) * math.ceil(problem.n / block_n)
    form = describe_config(config)
    alignment = problem.unaligned_for(ALIGNMENT // (4 if problem.dtype == "float32" else 2))
    stack = f" for each of {problem.batch} products in one launch" if problem.batch > 1 and spec.batched else ""
    return [
        f"kernel {spec.name}: {spec.idea}",
        *([f"form: {form}"] if form else []),
        f"tiles of {block_m}×{block_n}, {block_k} deep, by {geometry.threads} threads each: {tiles} of them{stack}",
        f"A is {problem.a_layout}-major, B {problem.b_layout}-major; "
        + (
            f"16-byte accesses everywhere are out: {alignment}" if alignment else "all are aligned for 16-byte accesses"
        ),
    ]
