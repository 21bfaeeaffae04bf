#!/bin/sh
# The full verdict of a contract on fresh prompts.
case "${1:-}:${2:-}" in -h:* | --help:* | :* | *:)
    echo "usage: check_contract.sh MODEL CONTRACT [DIR]
Compares rollout and training in every required condition, with throughput, accuracy and controls. DIR, a new folder, keeps the evidence.
Exit code: 0 exact and fast enough, 1 not, 2 bad input."
    case "${1:-}" in -h | --help) exit 0 ;; *) exit 2 ;; esac ;;
esac
command -v agent >/dev/null || { echo "the command agent is missing: pip install 'train-inference-consistency[cpu]'" >&2; exit 2; }
exec agent verify --model "$1" --contract "$2" --level full ${3:+"--evidence=$3"}
