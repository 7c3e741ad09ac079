#!/usr/bin/env bash
# Usage: bash scripts/rebuild_dedup_and_quant.sh --model-dir MODEL_DIR [--manifest MANIFEST]
#
# Removes what describes the derived files of MODEL_DIR (MANIFEST, model.ie.compat.json,
# model.dedup.json) and makes them again with run_quant_and_dedup.sh. The IEBIN pair stays; it is made
# if it is not there. MANIFEST is quant/q4_manifest.expanded.json unless given.
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

model=
manifest=quant/q4_manifest.expanded.json
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --model-dir | --manifest)
            if [ $# -lt 2 ]; then
                printf 'rebuild_dedup_and_quant.sh: %s needs a value\n' "$1" >&2
                exit 2
            fi
            if [ "$1" = --model-dir ]; then model=$2; else manifest=$2; fi
            shift 2
            ;;
        *)
            printf 'rebuild_dedup_and_quant.sh: unknown argument %s\n' "$1" >&2
            usage >&2
            exit 2
            ;;
    esac
done
if [ -z "$model" ]; then
    usage >&2
    exit 2
fi

scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
rm -f -- "$manifest" "$model/model.ie.compat.json" "$model/model.dedup.json"
exec bash "$scripts/run_quant_and_dedup.sh" "$model" "$manifest"
