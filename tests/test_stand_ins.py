"""Where Numba can't compile, a kernel's twin in CUDA C++ takes its place, and says so."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from numba_gemm import fallback
from numba_gemm.catalog import LADDER, kernels_for
from numba_gemm.compile.cuda_source import supported_archs
from numba_gemm.errors import CompileError
from numba_gemm.execute import _twin
from numba_gemm.fp32 import repack

CONTEXT = SimpleNamespace(device=SimpleNamespace(compute_capability=(9, 0)))
ERROR = CompileError("numba-cuda could not be imported\nand more")


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    try:
        supported_archs()
    except CompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", kernels_for("float32"))
def test_each_rung_has_a_twin_and_the_log_says_that_it_is_used(name, caplog):
    fallback._announce.cache_clear()
    with caplog.at_level(logging.WARNING, "numba_gemm"):
        twin = _twin(LADDER[name], CONTEXT, ERROR)
    original = fallback.STAND_INS.get(name, name)
    assert (twin.name, twin.source) == (f"{original}-nvcc", "cuda")
    assert twin.configs == LADDER[original].configs
    assert f"kernel {original}-nvcc is used in place of {name}: numba-cuda could not be imported" in caplog.text


@pytest.mark.parametrize("itemsize", [2, 4])
def test_repacking_has_one_too(itemsize):
    twin = _twin(repack.SPECS[itemsize], CONTEXT, ERROR)
    assert twin.source == "cuda"
    forms = repack.SPECS[itemsize].configs
    assert twin.configs == tuple(form for form in forms if not dict(form).get("filled")), "it fills no rows up"
    assert len(twin.configs) == 3


def test_what_is_not_numbas_has_none():
    with pytest.raises(CompileError, match="could not be imported"):
        _twin(LADDER["t2"], CONTEXT, ERROR)


def test_without_numba_the_compiler_says_how_to_get_it():
    program = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "import numba_gemm as ng\n"
        "from numba_gemm.catalog import LADDER\n"
        "from numba_gemm.compile import kernel_ptx\n"
        "try:\n"
        "    kernel_ptx(LADDER['v1'], (), (8, 0))\n"
        "except ng.CompileError as error:\n"
        "    assert \"pip install 'numba-gemm[cu13]'\" in str(error), error\n"
        "else:\n"
        "    raise SystemExit('compiled without Numba')\n"
        "import numpy as np\n"
        "assert ng.matmul(np.eye(2, dtype='f'), np.eye(2, dtype='f'), device='cpu').sum() == 2\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
