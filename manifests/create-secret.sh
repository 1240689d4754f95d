#!/bin/sh
# Makes the Secret `steadytrain` of a namespace, with a password for MLflow that nobody has seen:
#   sh manifests/create-secret.sh NAMESPACE [FILE]
# FILE has further keys, as KEY=VALUE a line: AWS_ACCESS_KEY_ID, HF_TOKEN, STEADYTRAIN_WEBHOOK_URL.
# A Secret that is already there stays as it is.
set -eu
namespace=$1 file=${2:-/dev/null}
random() { openssl rand -hex 32; }

# The values pass through a pipe: as arguments, every process of this machine could read them.
password=$(random) key=$(random)
{
  printf '%s\n' MLFLOW_TRACKING_URI=http://steadytrain-mlflow:5000 \
    MLFLOW_TRACKING_USERNAME=steadytrain "MLFLOW_TRACKING_PASSWORD=$password" \
    "MLFLOW_FLASK_SERVER_SECRET_KEY=$key"
  cat "$file"
} | kubectl create secret generic steadytrain --namespace "$namespace" --from-env-file=/dev/stdin
