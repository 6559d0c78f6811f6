"""A launch to profile: what ``profile.py`` counts, ``ncu.py`` measures and ``profile_target.py`` carries out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from numba_gemm.catalog import get_spec
from numba_gemm.choose import choose
from numba_gemm.errors import KernelConstraintError
from numba_gemm.problem import Problem
from numba_gemm.spec import Config, KernelSpec, describe_config, make_config


@dataclass(frozen=True)
class Job:
    """One launch to profile: a kernel on packed matrices; no config stands for the best form that the shape allows."""

    kernel: str
    m: int
    n: int
    k: int
    config: Config | None = None

    def __str__(self) -> str:
        """``"v6:130x134x37"`` or ``"v6:64x64x8:vector_width=1"``, which :meth:`parse` reads."""
        form = "" if self.config is None else ":" + ",".join(f"{key}={value}" for key, value in self.config)
        return f"{self.kernel}:{self.m}x{self.n}x{self.k}{form}"

    @classmethod
    def parse(cls, text: str) -> Job:
        """A job from its string.

        Raises
        ------
        ValueError : if it has another form.
        """
        found = re.fullmatch(r"([\w-]+):(\d+)x(\d+)x(\d+)(?::((?:\w+=\w+,?)*))?", text)
        if not found:
            raise ValueError(f"job {text!r} has another form than KERNEL:MxNxK or KERNEL:MxNxK:NAME=VALUE,…")
        config = None
        if found[5] is not None:
            pairs = (part.split("=") for part in found[5].split(",") if part)
            config = make_config(**{key: int(value) if value.isdigit() else value for key, value in pairs})
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), config)

    def problem(self) -> Problem:
        """The product: packed rows at aligned addresses, alpha 1, beta 0, of the first type that the form takes."""
        dtype = dict(self.config or ()).get("dtype", get_spec(self.kernel).dtypes[0])
        return Problem.packed(self.m, self.n, self.k, dtype=str(dtype))

    def resolve(self, arch: tuple[int, int]) -> tuple[KernelSpec, Config]:
        """The kernel and the form that is launched.

        Raises
        ------
        ValueError : for an unknown kernel or form.
        KernelConstraintError : if the form can't take the shape.
        """
        spec = get_spec(self.kernel)
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"shape {self.m} {self.n} {self.k}: every dimension must be 1 or more")
        if self.config is None:
            return choose(self.problem(), self.kernel, arch=arch)
        if self.config not in spec.configs:
            raise ValueError(f"kernel {spec.name} has no form {describe_config(self.config)!r}")
        unmet = spec.unmet(self.problem(), self.config)
        if unmet:
            raise KernelConstraintError(
                f"{spec.name} with {describe_config(self.config)} can't take {self.m}×{self.n}×{self.k}: {unmet}; "
                "leave --config out for the form that can"
            )
        return spec, self.config
