#!/bin/sh
# The full verdict of a contract on fresh prompts: check_contract.sh MODEL CONTRACT; exit code 0 exact and fast enough
set -eu
exec agent verify --model "${1:?usage: check_contract.sh MODEL CONTRACT}" --contract "${2:?usage: check_contract.sh MODEL CONTRACT}" --level full
