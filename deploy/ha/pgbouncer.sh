#!/bin/sh
# Writes the password of the database's user where PgBouncer looks for it, and starts PgBouncer.
set -eu
umask 077
quoted=$(printf '%s' "$EVERLOOP_PASSWORD" | sed 's/"/""/g')
printf '"everloop" "%s"\n' "$quoted" >/tmp/users.txt
exec pgbouncer /etc/pgbouncer/pgbouncer.ini
