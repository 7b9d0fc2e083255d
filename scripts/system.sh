#!/bin/sh
# The system's programs that Everloop uses: bubblewrap (the sandbox of commands) and ripgrep (search in files).
# With the argument "dev" also strace, with which tests watch what is flushed to the disk, chromium and firefox-esr, in
# which they open the web page, ngircd, dovecot and prosody, with which the channels talk, and pgbouncer, a pooler before
# PostgreSQL; the tests start these themselves. With "failover" what `make failover` runs a cluster of databases with.
# Installs what is missing where it may (apt, as root or by sudo without a password); otherwise it says what to install.
set -eu

missing=
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
command -v rg >/dev/null 2>&1 || missing="$missing ripgrep"
[ "${1:-}" != dev ] || command -v strace >/dev/null 2>&1 || missing="$missing strace"
[ "${1:-}" != dev ] || command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 ||
    missing="$missing chromium"
[ "${1:-}" != dev ] || command -v firefox-esr >/dev/null 2>&1 || command -v firefox >/dev/null 2>&1 ||
    missing="$missing firefox-esr"
PATH="$PATH:/usr/sbin"
[ "${1:-}" != dev ] || command -v ngircd >/dev/null 2>&1 || missing="$missing ngircd"
[ "${1:-}" != dev ] || command -v dovecot >/dev/null 2>&1 || missing="$missing dovecot-imapd"
[ "${1:-}" != dev ] || command -v pgbouncer >/dev/null 2>&1 || missing="$missing pgbouncer"
[ "${1:-}" != dev ] || command -v prosody >/dev/null 2>&1 || missing="$missing prosody"
if [ "${1:-}" = failover ]; then
    command -v pgbouncer >/dev/null 2>&1 || missing="$missing pgbouncer"
    command -v etcd >/dev/null 2>&1 || missing="$missing etcd-server"
    command -v haproxy >/dev/null 2>&1 || missing="$missing haproxy"
    command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
fi
[ -n "$missing" ] || exit 0

ask() {
    echo "everloop: please install$missing with your system's package manager (Debian/Ubuntu: apt install$missing," \
        "Fedora: dnf install$missing, macOS: brew install ripgrep); commands are confined by Landlock until then," \
        "and searches are slower" >&2
    exit 0
}

command -v apt-get >/dev/null 2>&1 || ask
if [ "$(id -u)" = 0 ]; then
    as_root=
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    ask
fi
echo "Installing$missing"
# A server that is installed for the tests must not be started as a service of the machine.
policy=/usr/sbin/policy-rc.d
if [ -n "${1:-}" ] && [ ! -e "$policy" ]; then
    trap '$as_root rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null && $as_root chmod 755 "$policy"
fi
# shellcheck disable=SC2086 # several words are meant
{ $as_root apt-get install -y -qq $missing || { $as_root apt-get update -qq && $as_root apt-get install -y -qq $missing; }; } \
    </dev/null >/dev/null 2>&1 || ask
