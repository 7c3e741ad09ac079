"""Print, as JSON, the machine code of launches that stand for several calls, for sm_90.

Of a row that a matmul makes itself, and of one that is made before, the sums' order; see
`cuda_aot_orders`. Run without TRITON_INTERPRET, see `cuda_cases.aot_report`.
"""

import json
from typing import Any

from aot import compile_code, compile_ir
from cuda_aot_orders import orders
from test_cuda_fused import SHAPES, lowered

CAPABILITY = 90
KERNELS = ["_gemv", "_gemv_bits", "_few", "_linear_ternary", "_router", "_decode", "_rows"]
KERNELS += ["_heads"]


def main() -> None:
    code: dict[str, dict[str, Any]] = {}
    for preset, linear, experts, *_ in SHAPES:
        for tokens in (1, 16):
            for launch in lowered(preset, linear, experts, 1, tokens):
                kernel, constants = launch.kernel.fn.__name__, launch.constants
                if kernel not in KERNELS:
                    continue
                k = constants.get("WIDTH" if kernel in ("_gemv", "_router") else "BLOCK")
                size = f"n{constants.get('N')} k{constants.get('K')}"
                name = f"{preset} {linear} m{tokens} {kernel} {size}"
                if name in code:
                    continue
                used = compile_code(launch, CAPABILITY)
                code[name] = {"local": used.local_bytes, "registers": used.registers}
                code[name] |= {"loads": used.instructions["LDG.E.EF.128"]}
                if kernel == "_rows" or launch.args.get("h") is not None:
                    found = [o for o in orders(compile_ir(launch, CAPABILITY)) if o[0] == k]
                    code[name]["sums"] = sorted(set(found))
    print(json.dumps(code))


if __name__ == "__main__":
    main()
