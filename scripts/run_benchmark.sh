#!/usr/bin/env bash
# Usage: bash scripts/run_benchmark.sh [TARGET] [FLAG...]
#
# What make bench does, without make and from any directory.
# TARGET is bench (the default), bench-cuda, bench-report or bench-verify; flags go to the harness.
# Variables are those of make bench: MODEL_DIR, PROMPTS, RUNS, MAX_NEW, ... (docs/benchmarking.md).
# Relative paths count from the current directory.
#
# Environment:
#   PYTHON  the interpreter; default python
#
# Example:
#   PROMPTS=bench/prompts_10.txt RUNS=5 bash scripts/run_benchmark.sh --sweep 'threads=1,2'
set -euo pipefail

target=bench
case ${1-} in
    -h | --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    bench | bench-cuda | bench-report | bench-verify)
        target=$1
        shift
        ;;
    '' | -*) ;;
    *)
        echo "run_benchmark.sh: got '$1', expected bench, bench-cuda, bench-report or bench-verify" >&2
        exit 2
        ;;
esac

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export MAKE_CALLED_FROM=$PWD
cd -- "$root"
exec "${PYTHON:-python}" -m bench.targets "$target" "$@"
