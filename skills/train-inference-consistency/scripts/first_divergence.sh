#!/bin/sh
# First divergence per dimension; with DIR also a repro of the first one.
case "${1:-}" in -h | --help | "")
    echo "usage: first_divergence.sh MODEL [DIR]
Names the first operator that differs, per dimension. With DIR, a new folder, also cuts the first one down to a repro there.
Exit code: 0 nothing differs, 1 something does, 2 bad input."
    [ -n "${1:-}" ]; exit $((2 * $?)) ;;
esac
command -v agent >/dev/null || { echo "the command agent is missing: pip install 'train-inference-consistency[cpu]'" >&2; exit 2; }
agent localize --model "$1"
found=$?
[ "$found" -eq 1 ] && [ -n "${2:-}" ] || exit "$found"
agent repro --model "$1" --out "$2" || exit
exit "$found"
