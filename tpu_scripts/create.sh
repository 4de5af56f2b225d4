#!/usr/bin/env bash
# Creates a TPU, one host or a pod: at once, or as soon as there is one.
#
#   create.sh --project P --zone Z --name N --accelerator-type v5litepod-8 [options] [-- FLAGS OF GCLOUD]
#
#   --queued             stand in the queue (a queued resource); without it, fail where none is free
#   --spot | --reserved  cheap and may be taken away at any time | from your reservation; default: on demand
#   --version V          runtime of the VMs; default: the one for the generation
#   --dry-run            print the commands only
#
# Each flag may come from the environment: PROJECT, ZONE, NAME, ACCELERATOR_TYPE, VERSION, QUEUED=1, SPOT=1 ...

set -euo pipefail
source "$(dirname "$0")/common.sh"
parse "accelerator-type version" "queued spot reserved" "$@"

[[ $ACCELERATOR_TYPE ]] || fail "--accelerator-type (or ACCELERATOR_TYPE) is missing"
[[ ! ($SPOT && $RESERVED) ]] || fail "--spot and --reserved exclude each other"
if [[ ! $VERSION ]]; then
  case $ACCELERATOR_TYPE in
    v4-*) VERSION=tpu-ubuntu2204-base ;;
    v5litepod-*) VERSION=v2-alpha-tpuv5-lite ;;
    v5p-*) VERSION=v2-alpha-tpuv5 ;;
    v6e-*) VERSION=v2-alpha-tpuv6e ;;
    *) fail "$ACCELERATOR_TYPE: name its runtime with --version" ;;
  esac
fi

flags=("--accelerator-type=$ACCELERATOR_TYPE" ${SPOT:+--spot} ${RESERVED:+--reserved} "${rest[@]}")
if [[ $QUEUED ]]; then
  tpus queued-resources create "$NAME" "--node-id=$NAME" "--runtime-version=$VERSION" "${flags[@]}"
else
  tpus tpu-vm create "$NAME" "--version=$VERSION" "${flags[@]}"
fi
