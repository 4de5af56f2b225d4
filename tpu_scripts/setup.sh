#!/usr/bin/env bash
# Installs ralm on every worker: Python 3.12, the project, and JAX for TPUs.
#
#   setup.sh --project P --zone Z --name N [options]
#
#   --source S      a checkout on this machine, of which what is committed is copied, or a git URL that needs no
#                   password; default: the checkout that this script is in
#   --ref R         branch, tag or (of a checkout) commit; default: HEAD
#   --extras E      extras of the project; default: tpu,data
#   --token-file F  Hugging Face token for models that want one, such as ~/.cache/huggingface/token; it is copied as a
#                   file that only you can read, and never shown
#   --dry-run       print the commands only
#
# Each flag may come from the environment: PROJECT, ZONE, NAME, SOURCE, REF, EXTRAS, TOKEN_FILE.

set -euo pipefail
source "$(dirname "$0")/common.sh"
parse "source ref extras token-file" "" "$@"
((${#rest[@]} == 0)) || fail "${rest[0]}: unknown; --help tells what there is"
[[ ! $SOURCE =~ ^https?://[^/]*@ ]] || fail "--source must not hold a password; name a checkout on this machine"
[[ ! $TOKEN_FILE || -f $TOKEN_FILE ]] || fail "$TOKEN_FILE: no such file"

install="ralm-jax/tpu_scripts/worker.sh install $(quoted "$EXTRAS")"
if [[ $SOURCE == *://* || $SOURCE == git@* ]]; then
  clone=$(quoted git clone --quiet --depth=1 ${REF:+"--branch=$REF"} "$SOURCE" ralm-jax)
  on_workers "rm -rf ralm-jax && $clone && $install"
else
  checkout=${SOURCE:-$(dirname "$scripts")}
  folder=$(git -C "$checkout" rev-parse --absolute-git-dir 2>/dev/null) || fail "$checkout: not a git checkout"
  run git -C "$checkout" archive --format=tar.gz "--output=$folder/ralm-jax.tar.gz" --prefix=ralm-jax/ "${REF:-HEAD}"
  tpus tpu-vm scp "$folder/ralm-jax.tar.gz" "$NAME:" "--worker=$WORKER"
  on_workers "rm -rf ralm-jax && tar -xzf ralm-jax.tar.gz && $install"
fi
if [[ $TOKEN_FILE ]]; then
  on_workers "umask 077 && mkdir -p .cache/huggingface"
  tpus tpu-vm scp "$TOKEN_FILE" "$NAME:.cache/huggingface/token" "--worker=$WORKER"
  on_workers "chmod 600 .cache/huggingface/token"
fi
