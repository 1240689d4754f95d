#!/bin/sh
# Create the Secret `steadytrain` in a namespace, with an MLflow password that nobody has seen:
#   sh manifests/create-secret.sh NAMESPACE [FILE]
# FILE has more keys, one KEY=VALUE per line: AWS_ACCESS_KEY_ID, HF_TOKEN, STEADYTRAIN_WEBHOOK_URL.
# An existing Secret is left unchanged.
set -eu
namespace=$1 file=${2:-/dev/null}
random() { openssl rand -hex 32; }

# The values go through a pipe: as arguments, every process on this machine could read them.
password=$(random) key=$(random)
{
  printf '%s\n' MLFLOW_TRACKING_URI=http://steadytrain-mlflow:5000 \
    MLFLOW_TRACKING_USERNAME=steadytrain "MLFLOW_TRACKING_PASSWORD=$password" \
    "MLFLOW_FLASK_SERVER_SECRET_KEY=$key"
  cat "$file"
} | kubectl create secret generic steadytrain --namespace "$namespace" --from-env-file=/dev/stdin
