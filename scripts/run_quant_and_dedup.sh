#!/usr/bin/env bash
# Usage: bash scripts/run_quant_and_dedup.sh MODEL_DIR [MANIFEST]
#
# Makes what is missing of a model's artifacts.
# MODEL_DIR has the checkpoint in hf/original or hf. In this order, each step only if its result is
# not there:
#   1. model.ie.json, model.ie.bin       the IEBIN pair (hf_to_iebin.py)
#   2. model.q4.bin, its scales, and     float projections in Q4_0 (gen_q4_bytes_stream_all.sh)
#      MANIFEST                          default quant/q4_manifest.expanded.json
#   3. model.ie.compat.json              the index over both (make_compat_index.py)
# Then always:
#   4. model.dedup.*                     lossless deduplication (clocher dedup); not written, and
#                                        said so, where it would save too little
#
# A model without float projections stops at step 2; call clocher dedup for it.
#
# Environment:
#   CHUNK_ROWS, IE_Q4_INCLUDE_LM_HEAD  as for gen_q4_bytes_stream_all.sh
#   PYTHON                             the interpreter; default python
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

case ${1-} in
    -h | --help)
        usage
        exit 0
        ;;
esac
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    usage >&2
    exit 2
fi

scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
model=$1
manifest=${2:-quant/q4_manifest.expanded.json}

hf=
for folder in "$model/hf/original" "$model/hf"; do
    if [ -f "$folder/config.json" ]; then
        hf=$folder
        break
    fi
done
if [ -z "$hf" ]; then
    printf 'run_quant_and_dedup.sh: no config.json in %s/hf/original or %s/hf\n' "$model" "$model" >&2
    exit 3
fi

if [ ! -f "$model/model.ie.json" ]; then
    "$python" "$scripts/hf_to_iebin.py" --hf-dir "$hf" --out-dir "$model"
fi
if [ ! -f "$model/model.ie.compat.json" ]; then
    if [ ! -f "$manifest" ] || [ ! -f "$model/model.q4.bin" ] ||
        [ ! -f "$model/model.q4.scales.fp16.bin" ]; then
        PYTHON=$python bash "$scripts/gen_q4_bytes_stream_all.sh" "$hf" "$model" "$manifest"
    fi
    "$python" "$scripts/make_compat_index.py" --model-dir "$model" --manifest "$manifest"
fi
# 8: deduplication would save too little and wrote nothing, which is an answer and no failure.
status=0
"$python" -m clocher_runtime dedup "$model" || status=$?
[ "$status" -eq 8 ] || exit "$status"
