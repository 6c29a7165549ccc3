#!/bin/sh
# The server: a SuperLink, and the run that is submitted to it.
export FLWR_HOME=/tmp/flwr-server
mkdir -p "$FLWR_HOME"
printf '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:8000"\ninsecure = true\n' >"$FLWR_HOME/config.toml"
flower-superlink --insecure --host 0.0.0.0 --disable-runtime-dependency-installation &
sleep 10
flwr run . here --stream
