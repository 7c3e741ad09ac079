"""Print what the inner loops of products of bytes have, from their object code: for test_isa.py.

A line for each format: its name, and the instructions for one unit of 16 rows and 32 columns with
one token, and with as many as registers hold.
"""

import re
import sys

from clocher_kernels.formats import parse_format
from cpu_fallback.lanes import jit
from cpu_fallback.tiles import tile_product
from cpu_fallback.tiles.layout import layout_of

_PRODUCT = re.compile(r"^\t(\{vex\}\s+)?vp(madd|dpbusd)", re.M)
_INSTRUCTION = re.compile(r"^\t(\{vex\}\s+)?[a-z]", re.M)

for name in sys.argv[1:]:
    kernel = tile_product.product_of(layout_of("table", parse_format(name)), 128)
    blocks = re.split(r"\n(?=\.LBB)", jit.assembly(kernel))
    loops = [block for block in blocks if len(_PRODUCT.findall(block)) >= 8]
    counts = sorted(len(_INSTRUCTION.findall(loop)) for loop in loops)
    print(name, counts[0], counts[-1])
