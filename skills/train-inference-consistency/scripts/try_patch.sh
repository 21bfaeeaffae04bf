#!/bin/sh
# One attempt by hand: a patch in a branch and worktree of its own, then the quick verdict of it.
case "${1:-}:${2:-}:${3:-}" in -h:* | --help:* | *::* | *:)
    echo "usage: try_patch.sh MODEL WORKSPACE PATCH-OPTIONS...
Patch options are those of 'agent patch', for example --set rms_norm=kernels:mine.rms_norm --file kernels/mine.py=mine.py
Prints the branch and worktree of the patch, then verifies it with the quick matrix. Exit code: 0 exact, 1 not, 2 bad input."
    case "${1:-}" in -h | --help) exit 0 ;; *) exit 2 ;; esac ;;
esac
command -v agent >/dev/null || { echo "the command agent is missing: pip install 'train-inference-consistency[cpu]'" >&2; exit 2; }
model=$1 workspace=$2
shift 2
patched=$(agent patch --workspace "$workspace" "$@" --json) || exit
field() { printf '%s' "$patched" | python3 -c "import json, sys; print(json.load(sys.stdin)['$1'])"; }
tree=$(field worktree)
echo "branch $(field branch), worktree $tree"
exec agent verify --model "$model" --contract "$tree/contract.toml" --level quick
