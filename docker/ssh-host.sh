#!/bin/sh
# An ssh server on port 2222 for the containers that share the folder ~/.ssh; the first of them makes the key of all.
set -eu
cd "$HOME/.ssh"
umask 077
exec 9>lock
flock 9
if [ ! -e config ]; then
    rm -f key key.pub
    ssh-keygen -q -t ed25519 -N "" -f key
    cp key.pub authorized_keys
    # The same key is the servers' own, so that nobody else's server is taken for one of these hosts.
    echo "* $(cut -d " " -f 1,2 key.pub)" >known_hosts
    printf 'Port 2222\nIdentityFile ~/.ssh/key\nIdentitiesOnly yes\nLogLevel ERROR\n' >draft
    mv draft config
fi
exec 9>&-
exec /usr/sbin/sshd -D -e -f /opt/dualdist/share/sshd_config -h "$HOME/.ssh/key"
