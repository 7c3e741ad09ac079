"""Serve a model at port 30000: `clocher serve`, one token after the other.

python scripts/wf_server.py --model-path MODEL [--port 30000] [flags of `clocher serve`]
"""

import sys

from as_module import run

if __name__ == "__main__":
    words = [word.replace("--model-path", "--model-dir", 1) for word in sys.argv[1:]]
    run("clocher_runtime", "serve", "--port", "30000", "--diffusion", "off", rest=words)
