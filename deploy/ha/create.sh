#!/bin/sh
# Run by Patroni once, on the first primary of a new cluster: the user and the database of Everloop.
set -eu
psql --dbname="$1" --set=ON_ERROR_STOP=1 --set=password="$EVERLOOP_PASSWORD" <<'SQL'
CREATE ROLE everloop LOGIN PASSWORD :'password';
GRANT pg_monitor TO everloop; -- `everloop doctor` tells the state of standbys
CREATE DATABASE everloop OWNER everloop;
SQL
