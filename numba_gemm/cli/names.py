"""Names that a user types: kernels, architectures, configs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from numba_gemm.catalog import CPU_BASELINE, SPECIAL, find_spec, get_spec, kernel_names
from numba_gemm.fallback import FALLBACKS
from numba_gemm.spec import Config, KernelSpec, describe_config, make_config

#: For helps: the kernels beside the ladder.
BESIDE_THE_LADDER = (
    f"beside the ladder {', '.join(SPECIAL)} and, in CUDA C++, {next(iter(FALLBACKS))} … {next(reversed(FALLBACKS))}"
)
#: Forms of a kernel that a message lists one by one.
_LISTED = 8


def check_kernels(names: Sequence[str], *, also: Sequence[str] = ()) -> list[str]:
    """The names once each, or every kernel if there are none.

    Raises
    ------
    ValueError : for one that is neither a kernel nor in ``also``.
    """
    for name in names:
        if name != CPU_BASELINE and name not in also:
            get_spec(name)
    return list(dict.fromkeys(names)) or kernel_names()


def gpu_kernels(names: Sequence[str]) -> list[str]:
    """Those of the names that are GPU kernels."""
    return [name for name in names if find_spec(name) is not None]


def parse_arch(text: str) -> tuple[int, int]:
    """``"sm_90"``, ``"90"`` or ``"9.0"`` as (9, 0); also ``"sm_90a"``, as reports name it.

    Raises
    ------
    ValueError : for anything else.
    """
    found = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)[af]?", text)
    if not found:
        raise ValueError(f"architecture {text!r} has another form than sm_90; write sm_90, 90 or 9.0")
    arch = (int(found.group(1)), int(found.group(2)))
    if not (7, 5) <= arch <= (12, 9):
        raise ValueError(f"architecture {text!r} is outside the range sm_75 … sm_129")
    return arch


def parse_config(spec: KernelSpec, parts: Sequence[str]) -> Config:
    """``["vector_width=1"]`` as the kernel's config: the first of its forms with these values; none given, the first.

    Raises
    ------
    ValueError : if the kernel has no such compiled form; the message lists those it has, or where they are many the
        values of each parameter.
    """
    values: dict[str, int | str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if not value:
            raise ValueError(f"config {part!r} has another form than name=number, for instance vector_width=1")
        values[key] = int(value) if value.isdigit() else value
    for config in spec.configs:
        if values.items() <= dict(config).items():
            return config
    asked = f"kernel {spec.name} has no form {describe_config(make_config(**values))!r}"
    if not any(spec.configs):
        raise ValueError(f"{asked}; it has one form, so leave --config out")
    forms = list(dict.fromkeys(form_options(spec, known) for known in spec.configs))
    if len(forms) <= _LISTED:
        raise ValueError(f"{asked}; its forms are: {' | '.join(forms)}")
    listed = "; ".join(f"{key}={' | '.join(known)}" for key, known in _values(spec).items())
    raise ValueError(f"{asked}; its {len(forms)} forms, which numba-gemm inspect {spec.name} lists, combine {listed}")


def _values(spec: KernelSpec) -> dict[str, list[str]]:
    """Parameter → the values that forms of a kernel have, of those in which its forms differ."""
    found: dict[str, list[str]] = {}
    for config in spec.configs:
        for key, value in config:
            known = found.setdefault(key, [])
            if str(value) not in known:
                known.append(str(value))
    return {key: known for key, known in found.items() if len(known) > 1}


def check_json_path(path: str) -> None:
    """Say before a run, not after it, that ``--json`` can't be written.

    Raises
    ------
    ValueError : for a folder, or a file in a folder that isn't there.
    """
    file = Path(path).absolute()
    if file.is_dir():
        raise ValueError(f"--json {path} is a folder; name a file in it, for instance {file / 'run.json'}")
    if not file.parent.is_dir():
        raise ValueError(f"--json {path}: there is no folder {file.parent}")


def form_options(spec: KernelSpec, config: Config) -> str:
    """What to write after ``--config`` for one of a kernel's forms: the parameters in which its forms differ."""
    differ = {key for key, value in config if any(dict(other).get(key) != value for other in spec.configs)}
    return describe_config(tuple(item for item in config if item[0] in differ)) or describe_config(config)


def default_arch() -> tuple[int, int]:
    """The GPU's, or that of an H100 where there is no GPU."""
    from numba_gemm.device.driver import is_available

    if is_available():
        from numba_gemm.device.context import device_properties

        return device_properties().compute_capability
    return (9, 0)
