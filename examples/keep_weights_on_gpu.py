"""Keep one operand on the GPU between calls: only the small one and the result cross the bus.

python examples/keep_weights_on_gpu.py
"""

import time

import numpy as np

import numba_gemm as ng

HIDDEN, WIDE, TOKENS, CALLS = 4096, 14336, 16, 20


def seconds(call) -> float:
    call()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((HIDDEN, WIDE), dtype=np.float32)
    tokens = generator.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    result = np.empty((TOKENS, WIDE), np.float32)

    with ng.device_put(weights) as on_gpu:
        each_time = seconds(lambda: ng.matmul(tokens, weights, out=result))
        kept = seconds(lambda: ng.matmul(tokens, on_gpu, out=result))

    worst = np.abs(result[:, :64] - tokens.astype(np.float64) @ weights[:, :64].astype(np.float64)).max()
    print(f"weights copied each time: {each_time * 1e3:.2f} ms; kept on the GPU: {kept * 1e3:.2f} ms")
    print(f"largest error of the first columns: {worst:.1e}")


if __name__ == "__main__":
    try:
        main()
    except ng.NoDeviceError as error:
        print(f"this example needs a GPU: {error.reason}")
