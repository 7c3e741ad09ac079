#!/usr/bin/env bash
# Usage: bash scripts/gen_q4_bytes_stream_all.sh HF_DIR MODEL_DIR [MANIFEST]
#
# Runs gen_q4_bytes_stream.py on the checkpoint in HF_DIR and writes MODEL_DIR/model.q4.bin,
# MODEL_DIR/model.q4.scales.fp16.bin and MANIFEST (default quant/q4_manifest.expanded.json).
#
# Environment:
#   IE_Q4_INCLUDE_LM_HEAD  0 leaves the output head out; default 1, because this is "all"
#   CHUNK_ROWS             rows that are encoded at a time
#   PYTHON                 the interpreter; default python
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

case ${1-} in
    -h | --help)
        usage
        exit 0
        ;;
esac
if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    usage >&2
    exit 2
fi

scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export IE_Q4_INCLUDE_LM_HEAD=${IE_Q4_INCLUDE_LM_HEAD:-1}
exec "${PYTHON:-python}" "$scripts/gen_q4_bytes_stream.py" \
    --hf-dir "$1" \
    --q4-bytes "$2/model.q4.bin" \
    --scales "$2/model.q4.scales.fp16.bin" \
    --manifest "${3:-quant/q4_manifest.expanded.json}"
