"""Print, as JSON, the machine code of experts that are multiplied in tiles.

Run without TRITON_INTERPRET, see `cuda_cases.aot_report`.
"""

import json

from aot import compile_code
from cuda_cases import meta_device
from test_cuda_moe import many

FORMATS = ("mxfp4", "int4_asym_g64_bf16", "bf16")


def main() -> None:
    code = {}
    for capability in (80, 86, 90):
        for fmt in FORMATS:
            for launch in many(fmt, 512, meta_device(capability)):
                used, constants = compile_code(launch, capability), launch.constants
                name = f"sm_{capability} {fmt} {launch.kernel.fn.__name__} n{constants.get('N')}"
                loop = used.loop
                code[name] = {
                    "local": used.local_bytes,
                    "shared": used.shared_bytes,
                    "products": sum(n for op, n in loop.items() if "MMA" in op),
                    "copies": sum(n for op, n in loop.items() if op.startswith("LDGSTS")),
                    "stores": sum(n for op, n in loop.items() if op.startswith("STS")),
                }
    print(json.dumps(code))


if __name__ == "__main__":
    main()
