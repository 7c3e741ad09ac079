#!/usr/bin/env bash
# Usage: bash scripts/true_tps_strict.sh [FLAG...]
#
# Runs python -m bench.strict: kernels, strict and end to end side by side, and the checks that the
# figures can be believed. Flags go to it; see its --help. A model must be named, and 64 MB of its
# files are walked over for each token, unless these variables say otherwise:
#
#   MODEL_DIR           the model
#   IE_REQUIRE_MODEL    default 1; 0 takes the embedded model where none is named
#   IE_BYTES_PER_TOKEN  default 64000000
#   IE_STRIDE_BYTES     default 256
#   IE_VERIFY_TOUCH     default 1
#   STRICT_REPORT_PATH  file for the figures, which make bench-verify checks; default: none
#   PYTHON              the interpreter; default python
#
# Exit codes: 0 every check holds; 7 one failed; 9 the machine was too noisy to tell; others as
# clocher-run has them.
set -euo pipefail

case ${1-} in
    -h | --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
esac

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export IE_REQUIRE_MODEL=${IE_REQUIRE_MODEL:-1}
export IE_BYTES_PER_TOKEN=${IE_BYTES_PER_TOKEN:-64000000}
export IE_STRIDE_BYTES=${IE_STRIDE_BYTES:-256}
export IE_VERIFY_TOUCH=${IE_VERIFY_TOUCH:-1}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
report=()
if [ -n "${STRICT_REPORT_PATH-}" ]; then
    report=(--json "$STRICT_REPORT_PATH")
fi
exec "${PYTHON:-python}" -m bench.strict ${report[@]+"${report[@]}"} "$@"
