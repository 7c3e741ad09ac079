#!/bin/sh
# Usage: scripts/set_numa.sh POLICY COMMAND [ARGUMENT...]
#
# Runs a command under a NUMA memory policy of the system, by numactl.
# POLICY is one of
#   interleave  spread memory over all nodes, a page each in turn
#   node:X      run on the CPUs of node X and take memory there first, elsewhere when it is full
#   strict      run and take memory on node 0 only; allocations fail when it is full
#   strict:X    the same on node X
#
# Example:
#   scripts/set_numa.sh node:0 clocher-run --max-new 100
set -eu

fail() {
    code=$1
    shift
    printf 'set_numa.sh: %s\n' "$*" >&2
    exit "$code"
}

case ${1-} in
    -h | --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    '') fail 2 'no policy; expected interleave, node:X, strict or strict:X, then a command' ;;
esac
policy=$1
shift
[ "${1-}" = -- ] && shift

node=0
case $policy in
    interleave) ;;
    strict) ;;
    node:* | strict:*)
        node=${policy#*:}
        case $node in
            '' | *[!0-9]*) fail 2 "policy $policy: expected the number of a node, such as ${policy%%:*}:0" ;;
        esac
        ;;
    *) fail 2 "policy $policy: expected interleave, node:X, strict or strict:X" ;;
esac
[ $# -gt 0 ] || fail 2 "policy $policy: no command to run"

command -v numactl >/dev/null 2>&1 ||
    fail 5 'numactl is not installed; install the package numactl, or run the command without this script'

nodes=${SET_NUMA_NODES-/sys/devices/system/node}
if [ "$policy" != interleave ] && [ ! -d "$nodes/node$node" ]; then
    known=$(ls "$nodes" 2>/dev/null | sed -n 's/^node\([0-9][0-9]*\)$/\1/p' | tr '\n' ' ') || known=
    fail 2 "policy $policy: this machine has no NUMA node $node; it has: ${known:-none}"
fi

case $policy in
    interleave) exec numactl --interleave=all -- "$@" ;;
    node:*) exec numactl --cpunodebind="$node" --preferred="$node" -- "$@" ;;
    strict*) exec numactl --cpunodebind="$node" --membind="$node" -- "$@" ;;
esac
