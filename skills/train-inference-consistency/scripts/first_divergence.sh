#!/bin/sh
# First divergence per dimension, and a repro of the first one: first_divergence.sh MODEL [OUT]
set -eu
model=${1:?usage: first_divergence.sh MODEL [OUT]}
agent localize --model "$model" || true
agent repro --model "$model" --out "${2:-repro-$model}"
