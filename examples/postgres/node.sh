#!/bin/sh
# A PostgreSQL server and its replica: node.sh primary ADDRESS, or node.sh replica ADDRESS OF_THE_PRIMARY.
set -e
home=/tmp/postgres-$1
mkdir -p "$home"
if [ "$(id -u)" = 0 ]; then  # which PostgreSQL refuses to be
    chown nobody "$home" && chmod 700 "$home"
    exec setpriv --reuid nobody --regid nogroup --clear-groups -- sh "$0" "$@"
fi
for bin in /usr/lib/postgresql/*/bin; do PATH=$bin:$PATH; done
data=$home/data
export PGUSER=postgres PGHOST=$home PGCONNECT_TIMEOUT=5

if [ "$1" = primary ]; then
    initdb -D "$data" -U postgres -A trust --no-sync >/dev/null
    echo "host replication postgres 0.0.0.0/0 trust" >>"$data/pg_hba.conf"
    postgres -D "$data" -c listen_addresses="$2" -c unix_socket_directories="$home" -c shared_buffers=16MB \
        -c synchronous_standby_names='*' -c log_min_messages=fatal &
    until [ "$(psql -qAtc "select state from pg_stat_replication" 2>/dev/null)" = streaming ]; do sleep 0.5; done
    psql -qc 'set synchronous_commit = local' -c 'create table payments (id int, amount int)'
    for mode in local remote_write; do
        for i in $(seq 20); do echo "insert into payments values ($i, $i);"; done >$home/inserts
        begin=$(date +%s%N)
        psql -qc "set synchronous_commit = $mode" -f $home/inserts
        echo "synchronous_commit = $mode: $(($(date +%s%N) - begin)) ns for 20 commits"
    done
else
    until pg_basebackup -h "$3" -D "$data" -R -X stream 2>/dev/null; do sleep 1; done
    echo "base backup copied"
    exec postgres -D "$data" -c listen_addresses= -c unix_socket_directories="$home" -c port=5433 -c shared_buffers=16MB \
        -c log_min_messages=fatal
fi
