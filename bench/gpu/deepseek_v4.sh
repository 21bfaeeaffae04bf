#!/bin/bash
# Everything about the DeepSeek-V4 slice in one call on one otherwise idle H200, written for ten minutes from a bare machine:
#   bench/gpu/deepseek_v4.sh OUT [WORK]      from the repository root; WORK holds the checkpoints (44 GB), /dev/shm by default
# Results go to OUT, to be copied to docs/results/deepseek-v4/. Steps that share the device take turns in their measurements (--lock);
# a step that failed or ran out of time can be run again alone. Loading and training beside it are not locked: throughput comes first.
set -u
OUT=$1; WORK=${2:-/dev/shm}; mkdir -p "$OUT"
SLICE="python3 -m bench.gpu.deepseek_v4_slice --out $OUT --work $WORK --lock $OUT/turn"
note() { echo "$SECONDS s: $*" | tee -a "$OUT/status.txt"; }
free_gib() { python3 -c "import torch; print(torch.cuda.mem_get_info()[0] >> 30)"; }
wait_for_memory() { while [ "$(free_gib)" -lt "$1" ] && [ "$SECONDS" -lt 900 ]; do sleep 2; done; }

python3 -m bench.gpu.deepseek_v4_warm & WARM=$!
$SLICE --steps checkpoint --minutes 3; note "checkpoint $?"
$SLICE --steps checkpoint --experts fp4 --minutes 3 & FP4=$!
wait $WARM || export VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0
note "compiled, FlashInfer's GEMM ${VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER:-1}"

$SLICE --steps candidates --memory-gib 50 & CANDIDATES=$!
$SLICE --steps cost --memory-gib 50 & COST=$!
$SLICE --steps graphs --memory-gib 50; note "graphs $?"
$SLICE --steps eager --memory-gib 50; note "eager $?"
$SLICE --steps restart --memory-gib 50; note "restart $?"
wait $CANDIDATES; note "candidates $?"
wait $COST; note "cost $?"
wait $FP4
wait_for_memory 72
$SLICE --steps training; note "training $?"
$SLICE --steps eager --experts fp4 --memory-gib 60; note "eager, MXFP4 experts $?"
